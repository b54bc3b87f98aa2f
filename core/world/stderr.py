"""The ranks' stderr: passed through to the watcher's own, with the end of each kept for error messages."""

import os
import threading
from collections import deque

TAIL_BYTES = 8192
BACKLOG_BYTES = 2**20


class Relay:
    """Writes to a descriptor that may block (a paused terminal, a full pipe) from a thread of its own; drops the oldest beyond
    1 MiB, so that no rank ever waits for whoever reads the owner's stderr."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._changed = threading.Condition()
        self._closed = False
        self._idle = True
        threading.Thread(target=self._run, name="tllm-stderr", daemon=True).start()

    def put(self, chunk: bytes) -> None:
        with self._changed:
            self._chunks.append(chunk)
            self._size += len(chunk)
            while self._size > BACKLOG_BYTES:
                self._size -= len(self._chunks.popleft())
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Waits until all is written, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle and not self._chunks, timeout)
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                _write_all(self._fd, chunk)
            except OSError:
                continue  # nobody reads it any more

    def _next(self) -> bytes | None:
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._chunks or self._closed)
            if not self._chunks:
                return None
            self._idle = False
            chunk = self._chunks.popleft()
            self._size -= len(chunk)
            return chunk


def _write_all(fd: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(fd, view) :]


class Tail:
    """One rank's stderr, read without blocking."""

    def __init__(self, fd: int, relay: Relay) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.eof = False
        self._relay = relay
        self._kept = bytearray()

    def read(self) -> None:
        """Takes what is there, passes it on and keeps its end."""
        try:
            while chunk := os.read(self.fd, 65536):
                self._relay.put(chunk)
                self._kept += chunk
                del self._kept[:-TAIL_BYTES]
            self.eof = True
        except BlockingIOError:
            return

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        os.close(self.fd)
