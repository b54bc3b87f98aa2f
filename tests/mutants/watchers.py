"""Watchers with one fault each, for the launchers that start them: `python -c "...; main(NAME)" watcher FD PARENT`."""

from __future__ import annotations

import sys

from tllm_core.contracts.interfaces import Failed
from tllm_core.contracts.messages import Obituary
from tllm_core.world import __main__ as world
from tllm_core.world import watcher
from tllm_core.world.watcher import OBITUARY_S, ORPHAN_S, Watcher


class WatchesItsOwnerBadly(Watcher):
    """The owner's death is nothing to it."""

    def _lose_owner(self):
        """Goes on."""


class TrustsAnEndThatWasAskedFor(Watcher):
    """An owner that dies after it asked for the world's end: that end is waited for, however long."""

    def _lose_owner(self):
        if not self._leaving:
            self._leaving = True
            self._news.announce(Obituary("the engine's owner is gone, and the engine ends"))
            self._loop.later(OBITUARY_S, self._end)
            self._loop.later(ORPHAN_S, self._kill)


class WatchesOnlyTheFirst(Watcher):
    """The end of a rank above 0 is not looked at."""

    def _look_after(self, ward):
        if ward.rank == 0 or self._leaving:
            super()._look_after(ward)


class EndsNobody(Watcher):
    """A rank that fails is told of, and the others go on."""

    def _fail(self, words: Failed):
        self._verdict = self._verdict or words
        self._news.fail(self._verdict)
        self._leaving = True


class BeatsWithoutLooking(Watcher):
    """Its beats say that all runs."""

    def _beat(self):
        beat_of = watcher.beat_of
        watcher.beat_of = lambda number, wards, *rest: beat_of(number, [], *rest)
        try:
            super()._beat()
        finally:
            watcher.beat_of = beat_of


class NeverGivesUp(Watcher):
    """A start may take as long as it likes."""

    def _give_start_up(self, limit_s):
        """Waits on."""


class IsReadyTooEarly(Watcher):
    """The world is ready when rank 0 is."""

    def _judge_ready(self):
        if self._wards[0].ready is not None and not self._ready:
            self._ready = True
            self._news.ready(self._wards[0].ready)


class TellsNobodyElse(Watcher):
    """Only the owner hears how the world ended."""

    def __init__(self, *args):
        super().__init__(*args)
        self._news.announce = lambda words: None


def main(name: str) -> None:
    """As `python -m tllm_core.world watcher`, with that class."""
    watcher.Watcher = globals()[name]
    sys.exit(world.main())
