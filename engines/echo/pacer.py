"""Spaces steps in time without blocking the loop that calls them: commands are taken meanwhile."""

import threading
import time
from collections.abc import Callable


class Pacer:
    """Says when the next step is due and calls `wake` at that time, from a thread of its own."""

    def __init__(self, interval_s: float, wake: Callable[[], None]) -> None:
        self._interval = interval_s
        self._wake = wake
        self._next = time.monotonic()
        self._changed = threading.Condition()
        self._armed = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="echo-pacer", daemon=True)
        self._thread.start()

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def stepped(self) -> None:
        """The next step is due one interval after this one was, or after now where this one came late by more than that."""
        now = time.monotonic()
        self._next = (self._next if now - self._next < self._interval else now) + self._interval

    def arm(self) -> None:
        """Has `wake` called once when the next step is due."""
        with self._changed:
            self._armed = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait_until_due():
            self._wake()

    def _wait_until_due(self) -> bool:
        with self._changed:
            while not self._closed:
                left = self._next - time.monotonic()
                if self._armed and left <= 0:
                    self._armed = False
                    return True
                self._changed.wait(left if self._armed else None)
        return False
