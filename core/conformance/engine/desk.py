"""One thread on which everything is asked of an engine, as a rank does it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
LEAVE_S = 5.0


class Desk:
    """A daemon thread that runs what it is given, one after the other."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stuck = ""
        self.thread = threading.Thread(target=self._run, name="tllm-conformance-engine", daemon=True)
        self.thread.start()

    def call(self, action: Callable[[], T], timeout_s: float, what: str) -> T:
        """What `action` returns or raises. AssertionError where it is not back within `timeout_s` seconds, and ever after."""
        assert not self._stuck, self._stuck
        answer: Future[T] = Future()
        self._orders.put((action, answer))
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if answer.done():
                raise
            self._stuck = f"{what} has not returned after {timeout_s:g} s"
            raise AssertionError(self._stuck) from None

    def close(self) -> None:
        """Ends the thread once it has done what it was given; does not wait for an engine that never returns."""
        self._orders.put(None)
        if not self._stuck:
            self.thread.join(LEAVE_S)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            action, answer = order
            try:
                answer.set_result(action())
            except BaseException as error:
                answer.set_exception(error)
            del order, action, answer
