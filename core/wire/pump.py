"""Waits for a port's frames without missing a deadline of a lane or a wake-up."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from tllm_core.contracts.interfaces import Frame, Port, PortState

Clock: TypeAlias = Callable[[], float]
T = TypeVar("T")

FOREVER = float("inf")
NEVER = float("-inf")


class Pump:
    """What both links share: waiting for frames without missing a deadline of a lane or a wake-up."""

    def __init__(self, port: Port, clock: Clock) -> None:
        self._port, self._clock = port, clock
        self._lock = threading.Lock()
        self._woken = False
        self._waits_until = NEVER
        self._path = port.state
        self._closed = False

    def wake(self) -> None:
        """Ends one blocked or next `receive` early. From any thread."""
        self._woken = True
        self._port.wake()

    def path(self) -> tuple[PortState, float]:
        """The port's own state, and when its path was last proven to work, in monotonic seconds."""
        return self._port.state, self._port.path_ok_at()

    def _prepare(self, now: float) -> float | None:
        """With the lock: what is due before waiting; when it has to be done again."""
        raise NotImplementedError

    def _path_changed(self) -> None:
        """With the lock: the port reconnected."""
        raise NotImplementedError

    def _wait(self, timeout: float | None, take: Callable[[Sequence[Frame], float], list[T]]) -> list[T]:
        """What `take` makes of arriving frames, at least one item; [] on timeout or `wake`."""
        now = self._clock()
        until = FOREVER if timeout is None else now + timeout
        while True:
            frames = self._receive(now, until)
            now = self._clock()
            items = take(frames, now)
            if items or now >= until or self._woken:
                self._woken = False
                return items

    def _receive(self, now: float, until: float) -> Sequence[Frame]:
        with self._lock:
            self._watch_path()
            at = self._prepare(now)
            waits_until = until if at is None or at > until else at
            self._waits_until = waits_until
        try:
            return self._port.receive(None if waits_until == FOREVER else max(0.0, waits_until - now))
        finally:
            self._waits_until = NEVER

    def _watch_path(self) -> None:
        state, before = self._port.state, self._path
        if state is before:
            return
        self._path = state
        if state.up and (not before.up or state.since != before.since):
            self._path_changed()

    def _hurry(self, at: float | None) -> None:
        """Has the receiving thread look earlier than it meant to, where a lane needs it."""
        if at is not None and at < self._waits_until:
            self._port.wake()
