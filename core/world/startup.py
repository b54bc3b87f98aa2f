"""What start-up is doing, in words, and since when."""

import time
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Phase
from tllm_core.contracts.messages import RankState


class StartUp:
    """Follows the phases of a world that is not ready yet, and which of its ranks stand still."""

    def __init__(self) -> None:
        self._phases: dict[int, Phase] = {}
        self._shown = Phase(0, "starting")
        self._since = self._told_at = time.monotonic()
        self._stopped: list[int] = []

    def note(self, phase: Phase) -> None:
        """Ranks that load side by side tell the same phase in turn: it begins with the last of them."""
        before = self._phases.get(phase.rank)
        self._phases[phase.rank] = phase
        if before is None or before.name != phase.name:
            self._shown, self._since = phase, time.monotonic()
        elif self._shown.rank == phase.rank:
            self._shown = phase

    def note_states(self, states: Sequence[RankState]) -> None:
        """As of the last beat."""
        self._stopped = [rank for rank, state in enumerate(states) if state == RankState.STOPPED]

    def stall(self, limit_s: float) -> str | None:
        """What to tell people: once the present phase has taken longer than `limit_s`, and again each time as much has passed."""
        now = time.monotonic()
        if now - max(self._since, self._told_at) < limit_s:
            return None
        self._told_at = now
        return f"still starting: {self._where()}"

    def given_up(self, limit_s: float) -> str:
        """Why the world was given up after `ready_timeout_s`."""
        return f"the engine was not ready within {limit_s:g} s (ready_timeout_s); {self._where()}"

    def _where(self) -> str:
        done = "" if self._shown.done is None else f" ({self._shown.done:.0%} done)"
        since_s = time.monotonic() - self._since
        stopped = "".join(f"; rank {rank} is stopped" for rank in self._stopped)
        return f"rank {self._shown.rank} has been {self._shown.name!r}{done} for {since_s:.0f} s{stopped}"
