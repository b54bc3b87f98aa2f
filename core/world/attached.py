"""A world that somebody else started, as its watcher tells of it over a lane."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, Identity, Port, World, WorldEvent
from tllm_core.contracts.messages import DownMessage, Goodbye, Obituary, Plain
from tllm_core.errors import PortClosed, TransportError
from tllm_core.wire.link import FrontendLink
from tllm_core.world.process import ends
from tllm_core.world.vigil import Vigil

WORDS_S = 0.05
"""How long the watcher's own words are waited for once a process of the world is seen to have ended."""


class AttachedWorld(World):
    """Beats, the obituary and the orderly end come over `link`, which is open; its `port` says whether the path works.

    `processes`: name -> a process of this host, whose end is noticed also where nobody tells of it. The watcher's rank is -1.
    """

    owned = False

    def __init__(self, link: FrontendLink, port: Port, processes: dict[str, Identity]) -> None:
        self._link, self._port = link, port
        self._processes = processes
        self._ended: str | None = None
        self._over = False
        self._vigil = Vigil()
        for name, identity in processes.items():
            self._vigil.watch(identity, lambda name=name: self._notice(name))  # type: ignore[misc]

    def events(self, timeout: float | None) -> Sequence[WorldEvent]:
        """Raises Expelled once the watcher has given this frontend up."""
        if self._over:
            return []
        try:
            messages = self._link.receive(timeout)
            if not messages and self._ended is not None:
                messages = self._last_words()
        except PortClosed:
            return self._end(Exited(clean=True, message="this frontend has left"))
        beats = [Beaten(beat) for beat in self._link.take_beats()]
        if messages:
            return [*beats, *self._words(messages[0])]
        if self._ended is not None:
            message = f"{self._first_ended()} is gone"
            return [*beats, *self._end(Failed(message), Exited(False, message))]
        return beats

    def _last_words(self) -> list[DownMessage]:
        """The watcher's, within WORDS_S: the ends of further processes cut no wait short."""
        messages = list[DownMessage]()
        until = time.monotonic() + WORDS_S
        while not messages and (left := until - time.monotonic()) > 0:
            messages = self._link.receive(left)
        return messages

    def _first_ended(self) -> str | None:
        """A watcher tells of every end but its own, which takes the ranks along: one that is gone and said nothing was first,
        whichever end was noticed before."""
        for name, identity in self._processes.items():
            if identity.rank < 0 and ends(identity):
                return name
        return self._ended

    def _words(self, message: DownMessage) -> list[WorldEvent]:
        if isinstance(message, Obituary):
            words = Failed(message.message, message.rank, message.exitcode, message.traceback, message.stderr_tail)
            return self._end(words, Exited(False, message.message))
        return self._end(Exited(clean=True, message="the engine was stopped"))

    def _end(self, *events: WorldEvent) -> list[WorldEvent]:
        self._over = True
        return list(events)

    def _notice(self, name: str) -> None:
        self._ended = self._ended or name
        self._link.wake()

    def wake(self) -> None:
        self._link.wake()

    def path_ok_at(self) -> float:
        return self._port.path_ok_at()

    def stop(self, timeout: float) -> bool:
        """An attached frontend stops nothing."""
        return True

    def kill(self) -> None:
        """Leaves the watcher; nothing but this side's end of the lane is closed."""
        self._vigil.close()
        with contextlib.suppress(TransportError):
            self._link.send(Goodbye())
        self._link.close()

    def describe(self) -> dict[str, Plain]:
        return {"attached": True, **{name: identity.pid for name, identity in self._processes.items()}}
