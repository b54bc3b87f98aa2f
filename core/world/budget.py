"""The error budget: how many of its requests an engine may fail before that counts as its death. Sans-IO."""

from collections import deque

from tllm_core.contracts.messages import ErrorReport
from tllm_core.errors import TllmError


class BudgetExhausted(TllmError):
    """An engine failed too many requests in too short a time."""


class ErrorBudget:
    """`limit` failures within `window_s` seconds are too many; None = there is no limit.

    Only what failed in a step counts, and only where no field of the request is named as the reason: a request that was
    rejected, or that is wrong by itself, says nothing about the engine.
    """

    __slots__ = ("_failed_at", "_last", "limit", "window_s")

    def __init__(self, limit: int | None, window_s: float) -> None:
        self.limit, self.window_s = limit, window_s
        self._failed_at: deque[float] = deque(maxlen=limit)
        self._last = ""

    def spend(self, error: ErrorReport, now: float) -> None:
        """Counts one request that ended with this error at monotonic time `now`."""
        if self.limit is not None and error.field is None:
            self._failed_at.append(now)
            self._last = error.message

    def check(self) -> None:
        """Raises BudgetExhausted once too many failed. What lies `window_s` or more behind the last failure is forgotten."""
        if self.limit is None or len(self._failed_at) < self.limit:
            return
        took_s = self._failed_at[-1] - self._failed_at[0]
        if took_s < self.window_s:
            requests = "1 request" if self.limit == 1 else f"{self.limit} requests"
            raise BudgetExhausted(
                f"{requests} failed in the engine within {took_s:.1f} s, which counts as its death "
                f"(error_budget, error_budget_window_s); the last one: {self._last}"
            )
