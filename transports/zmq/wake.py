"""A descriptor that ends a poll."""

import contextlib
import socket
import threading


class Wake:
    """A flag that `select.poll` can wait for. All methods are thread-safe, never block, and do nothing once closed."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        # Re-entrant, because a signal handler may call set() in a thread that is inside of it.
        self._lock = threading.RLock()
        self._closed = False

    def fileno(self) -> int:
        return self._reading.fileno()

    def set(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                self._writing.send(b"\0")

    def clear(self) -> None:
        """Forgets every `set` before it."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while not self._closed and len(self._reading.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reading.close()
            self._writing.close()

    def disown(self) -> None:
        """Closes a forked child's copy, whoever held the lock at the fork."""
        self._lock = threading.RLock()
        self.close()
