"""What the watcher waits for: descriptors and times."""

import heapq
import itertools
import os
import selectors
import time
from collections.abc import Callable
from typing import Protocol

Then = Callable[[], None]


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Loop:
    """Calls back when a descriptor is readable or a time has come; one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Then]] = []
        self._order = itertools.count()

    def watch(self, source: int | HasFileno, then: Then) -> None:
        """Calls `then` whenever the source is readable, until `forget`."""
        self._selector.register(source, selectors.EVENT_READ, then)

    def forget(self, source: int | HasFileno) -> None:
        self._selector.unregister(source)

    def once(self, fd: int, then: Then) -> None:
        """Takes the descriptor over; calls `then` once it is readable, and closes it."""

        def run() -> None:
            self.forget(fd)
            os.close(fd)
            then()

        self.watch(fd, run)

    def later(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), then))

    def turn(self) -> None:
        """Waits for whatever is next, and calls back for all that is due."""
        timeout = None if not self._timers else max(0.0, self._timers[0][0] - time.monotonic())
        for key, _ in self._selector.select(timeout):
            # An earlier callback of this round may have forgotten it.
            if key.fd in self._selector.get_map():
                key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
