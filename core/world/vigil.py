"""Notices the end of processes that are nobody's children: one small thread over their pidfds."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from tllm_core.contracts.interfaces import Identity
from tllm_core.world.process import LINUX, is_alive, open_pidfd

Then = Callable[[], None]


def _nothing() -> None:
    """Forgets what is not watched."""


class Vigil:
    """Calls back from its thread, once, when a watched process ends. Where there are no pidfds (macOS) it never does.

    All methods may be called from any thread. The thread starts with the first process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._then: dict[int, tuple[Identity, Then]] = {}
        self._epoll = select.epoll() if LINUX else None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._waker = -1

    def watch(self, identity: Identity, then: Then) -> Then:
        """Returns what forgets it again. A process that is gone already calls back before this returns."""
        if self._epoll is None:
            return _nothing
        pidfd = open_pidfd(identity.pid)
        if not is_alive(identity):
            if pidfd is not None:
                os.close(pidfd)
            then()
            return _nothing
        if pidfd is None:
            return _nothing
        with self._lock:
            if self._closed:
                os.close(pidfd)
                return _nothing
            self._then[pidfd] = (identity, then)
            self._epoll.register(pidfd, select.EPOLLIN)
            self._start()
        return lambda: self._forget(pidfd, identity)

    def close(self) -> None:
        """Forgets all and ends the thread; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._thread is not None:
                os.eventfd_write(self._waker, 1)
        if self._thread is None:
            self._free()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None and self._epoll is not None:
            self._waker = os.eventfd(0)
            self._epoll.register(self._waker, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="tllm-vigil", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        assert self._epoll is not None
        while not self._closed:
            for fd, _ in self._epoll.poll():
                self._look(fd)
        self._free()

    def _look(self, pidfd: int) -> None:
        with self._lock:
            identity, then = self._then.get(pidfd, (None, _nothing))
            # A descriptor that was forgotten after the poll may be another process's by now.
            if identity is None or is_alive(identity):
                return
            self._drop(pidfd)
        then()

    def _forget(self, pidfd: int, identity: Identity) -> None:
        with self._lock:
            if self._then.get(pidfd, (None, None))[0] is identity:
                self._drop(pidfd)

    def _drop(self, pidfd: int) -> None:
        assert self._epoll is not None
        del self._then[pidfd]
        self._epoll.unregister(pidfd)
        os.close(pidfd)

    def _free(self) -> None:
        with self._lock:
            for pidfd in list(self._then):
                self._drop(pidfd)
            if self._epoll is not None:
                self._epoll.close()
            if self._waker >= 0:
                os.close(self._waker)
