"""What a port received and has yet to hand out."""

from __future__ import annotations

import threading

from tllm_core.errors import PortClosed


class Inbox:
    """Blocks of bytes, bounded in bytes; what finds no room is dropped, and `take` tells that once. All methods thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ready = threading.Condition()
        self._blocks: list[bytes] = []
        self._bytes = 0
        self._woken = self._dropped = self._closed = False

    def put(self, block: bytes) -> None:
        with self._ready:
            if self._closed or (self._bytes + len(block) > self._capacity and self._blocks):
                self._dropped = True
                return
            self._blocks.append(block)
            self._bytes += len(block)
            self._ready.notify()

    def dropped(self) -> None:
        """Something was lost on its way here."""
        with self._ready:
            self._dropped = self._woken = True
            self._ready.notify()

    def take(self, timeout: float | None) -> tuple[list[bytes], bool]:
        """All that is there, once there is something, or `wake`, or `timeout` seconds passed; and whether anything was lost.

        Raises PortClosed.
        """
        with self._ready:
            if not (self._blocks or self._woken or self._closed):
                self._ready.wait_for(lambda: self._blocks or self._woken or self._closed, timeout)
            if self._closed:
                raise PortClosed("this nats port was closed")
            blocks, self._blocks = self._blocks, []
            dropped, self._dropped = self._dropped, False
            self._bytes, self._woken = 0, False
            return blocks, dropped

    def wake(self) -> None:
        with self._ready:
            self._woken = True
            self._ready.notify()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._blocks = []
            self._ready.notify_all()
