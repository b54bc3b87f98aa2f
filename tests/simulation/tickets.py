"""What a caller holds of its request, and the event on which a simulated thread waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tllm_core.ledger.ledger import Mailbox, Outcome
from tllm_core.ledger.result import GenerationResult

from .timeline import GRAIN_S, Blocked

if TYPE_CHECKING:
    from .composition import Simulation


class SimEvent:
    """A threading.Event on which an actor waits."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._set = sim, False
        self._until: float | None = None

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def sleep_on(self) -> None:
        """Who waits here is woken by nothing else."""
        if self._until is not None and not self._set and self._sim.timeline.now < self._until:
            raise Blocked(self._until + GRAIN_S)

    def wait(self, timeout: float) -> bool:
        now = self._sim.timeline.now
        if self._until is None:
            self._until = now + timeout
        if now < self._until and not self._set:
            raise Blocked(self._until + GRAIN_S)
        self._until = None
        return self._set


class Ticket:
    """One submitted request, and how much of its result was checked."""

    __slots__ = (
        "abort_asked",
        "box",
        "checked",
        "length",
        "lost_at",
        "n",
        "number",
        "outcome",
        "result",
        "rows_left",
        "submitted_at",
        "timeout_s",
    )

    def __init__(self, number: int, n: int, length: int, timeout_s: float | None, submitted_at: float) -> None:
        self.number, self.n, self.length, self.timeout_s = number, n, length, timeout_s
        self.submitted_at = submitted_at
        self.box: Mailbox | None = None
        self.result: GenerationResult | None = None
        self.outcome: Outcome | None = None
        self.abort_asked = False
        self.lost_at: float | None = None
        self.checked = [0] * n
        self.rows_left = 0
