"""What a port has read and its owner has not taken yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Frame
from tllm_core.errors import PortClosed


class Inbox:
    """Frames from the reading thread to whoever calls `receive`; bounded by letting the reading thread wait."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self._changed = threading.Condition()
        self._frames: list[Frame] = []
        self._size = 0
        self._woken = False
        self._closed = False

    def put(self, frames: Sequence[Frame], size: int) -> None:
        """Adds frames of `size` bytes; from the reading thread."""
        with self._changed:
            self._frames += frames
            self._size += size
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Returns once there is room for more, or it is closed."""
        with self._changed:
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        return self._closed or (len(self._frames) < self._max_frames and self._size < self._max_bytes)

    def take(self, timeout: float | None) -> list[Frame]:
        """All frames that are there; [] after `timeout` seconds or `wake`. Raises PortClosed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not (self._frames or self._woken or self._closed):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return []
                self._changed.wait(left)
            if self._closed:
                raise PortClosed("this redis port was closed")
            self._woken = False
            frames, self._frames, self._size = self._frames, [], 0
            self._changed.notify_all()
            return frames

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._frames = []
            self._changed.notify_all()

    def disown(self) -> None:
        """In a forked child, whoever held the lock at the fork."""
        self._changed = threading.Condition()
        self._closed = True
