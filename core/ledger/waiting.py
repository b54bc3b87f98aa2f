"""How consumers wait and are woken: asyncio futures on any loop, held locks on any thread; one wake-up per loop and batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable

from tllm_core.contracts.values import MAX_WAIT_S, seconds
from tllm_core.ledger.ledger import Waiter


def wake_all(waiters: Iterable[Waiter]) -> int:
    """Wakes every waiter; returns how many could not be, since their loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    lost = 0
    for waiter in waiters:
        if isinstance(waiter, ThreadWaiter):
            waiter.wake()
            continue
        loop = waiter.get_loop()
        futures = by_loop.get(loop)
        if futures is None:
            by_loop[loop] = [waiter]
        else:
            futures.append(waiter)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, futures)
        except RuntimeError:  # the loop is closed; its tasks are gone with it
            lost += len(futures)
    return lost


def discard(waiters: list[Waiter], waiter: Waiter) -> None:
    """Takes back a waiter that nobody needs any more; quiet where it was taken already."""
    with contextlib.suppress(ValueError):
        waiters.remove(waiter)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def async_waiter() -> asyncio.Future[None]:
    """A waiter for the running loop."""
    return asyncio.get_running_loop().create_future()


class ThreadWaiter:
    """Lets one thread sleep until another wakes it; a wake that comes first is not lost."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float | None) -> bool:
        return self._lock.acquire(timeout=MAX_WAIT_S if timeout is None else min(max(timeout, 0.0), MAX_WAIT_S))

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # woken already
            self._lock.release()


class Deadline:
    """One budget for all steps of a wait; `timeout` in seconds, None = without end. Raises ValueError as `seconds` does."""

    __slots__ = ("_at",)

    def __init__(self, timeout: float | None) -> None:
        wait_s = seconds(timeout)
        self._at = None if wait_s is None else time.monotonic() + wait_s

    def left(self) -> float | None:
        return None if self._at is None else self._at - time.monotonic()
