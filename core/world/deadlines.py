"""Deadlines of requests, earliest first. Sans-IO: time is passed in."""

import heapq
from collections.abc import Container


class Deadlines:
    """A heap of (monotonic seconds, request id) that forgets requests which ended by themselves."""

    def __init__(self, live: Container[int]) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []
        self._forget_at = 64

    def add(self, request_id: int, at: float) -> None:
        heapq.heappush(self._heap, (at, request_id))
        if len(self._heap) > self._forget_at:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
            self._forget_at = 64 + 2 * len(self._heap)

    def next_at(self) -> float | None:
        """When the next live request is due, None where none has a deadline."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[int]:
        """The live requests whose deadline has passed."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            request_id = heapq.heappop(self._heap)[1]
            if request_id in self._live:
                due.append(request_id)
        return due
