"""Virtual time: events in order, and actors that run until they would block."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection
from typing import Any

NEVER = float("inf")
GRAIN_S = 1e-9
"""A sleeper wakes this much late, as under a real clock: never before what it waited for."""


class Blocked(BaseException):
    """Unwinds a thread's code out of a call that would block. It runs again at `until`, or earlier if it is woken.

    The threads' loops keep nothing in local variables across their blocking calls, so that running again is resuming.
    """

    @property
    def until(self) -> float:
        return self.args[0]


def _nothing() -> None:
    """The turn of a thread that has ended."""


class Timeline:
    """The events to come. `clock` is what everything in the simulation takes for the monotonic clock."""

    __slots__ = ("_events", "_order", "now", "steps")

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def at(self, when: float, action: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), action, args))

    def later(self, seconds: float, action: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action, args))

    def run(self, limit: float, touched: Collection[Any] = (), after: Callable[[], None] = _nothing) -> None:
        """Runs what is due by `limit`, in order, and calls `after` after each event that left something in `touched`; the
        time is `limit` then."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= limit:
            when, _, action, args = pop(events)
            if when > self.now:
                self.now = when
            self.steps += 1
            action(*args)
            if touched:
                after()
        self.now = max(self.now, limit)


class Process:
    """What can crash, freeze and thaw: some actors that share one fate."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.alive = True
        self.frozen_at: float | None = None
        self.actors: list[Actor] = []

    @property
    def runs(self) -> bool:
        return self.alive and self.frozen_at is None

    def freeze(self) -> None:
        if self.alive and self.frozen_at is None:
            self.frozen_at = self.timeline.now

    def thaw(self) -> None:
        if self.frozen_at is not None:
            self.frozen_at = None
            for actor in self.actors:
                actor.wake(self.timeline.now)

    def crash(self) -> None:
        self.alive = False


class Actor:
    """One thread of a process: `turn` runs from one blocking call to the next. `ends`: a turn that returns was the last one."""

    __slots__ = ("_at", "_queued", "_running", "_timeline", "ends", "process", "touch", "turn")

    def __init__(self, process: Process, turn: Callable[[], object], touch: Callable[[Process], object]) -> None:
        self.process, self.turn, self.touch = process, turn, touch
        self._at = NEVER
        self._queued: set[float] = set()
        self._timeline = process.timeline
        self._running = self.ends = False
        process.actors.append(self)

    def wake(self, when: float) -> None:
        """Runs at `when`, or earlier."""
        if when < self._at and self.turn is not _nothing:
            self._at = when
            queued = self._queued
            if when not in queued:
                queued.add(when)
                timeline = self._timeline
                heapq.heappush(timeline._events, (when, next(timeline._order), self._fire, (when,)))

    def _fire(self, when: float) -> None:
        self._queued.discard(when)
        if when != self._at:
            return
        self._at = NEVER
        process = self.process
        # One that is running is below on the stack, in the middle of something.
        if not process.alive or process.frozen_at is not None or self._running:
            return
        self._running = True
        self.touch(process)
        try:
            self.turn()
            if self.ends:
                self.turn = _nothing
        except Blocked as blocked:
            (until,) = blocked.args
            if until != NEVER:
                self.wake(until)
        finally:
            self._running = False
