"""Waiting for the ends of many outputs at once, on one thread, so that the stop strings of all are found as they come."""

from __future__ import annotations

from collections import deque

from tllm_core.ledger.waiting import ThreadWaiter
from tllm_core.llm.output import RequestOutput


class Bell(ThreadWaiter):
    """A waiter that says whose news it was woken for."""

    __slots__ = ("_crowd", "output")

    def __init__(self, crowd: Crowd, output: RequestOutput) -> None:
        self._crowd = crowd
        self.output = output

    def wake(self) -> None:
        self._crowd.rung.append(self)
        self._crowd.waiter.wake()


class Crowd:
    """Outputs that run. The cost of a wake-up is that of the outputs that have news, not of all."""

    def __init__(self) -> None:
        self.rung: deque[Bell] = deque()
        self.waiter = ThreadWaiter()
        self._watched: set[Bell] = set()

    @property
    def running(self) -> int:
        return len(self._watched)

    def add(self, output: RequestOutput) -> None:
        """Takes an output in. Raises its error if it has ended with one already."""
        bell = Bell(self, output)
        self._watched.add(bell)
        if not output.leave_until_end(bell):
            self._watched.discard(bell)
            output.result(0)

    def wait(self, at_most: int = 0) -> None:
        """Blocks until no more than `at_most` outputs run. Raises the first error among them."""
        while self.running > at_most:
            self.waiter.wait(None)
            while self.rung:
                bell = self.rung.popleft()
                if bell in self._watched:
                    self._watched.discard(bell)
                    bell.output.take_back(bell)
                    self.add(bell.output)
