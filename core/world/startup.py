"""What start-up is doing, in words, and since when."""

import time

from tllm_core.contracts.interfaces import Phase
from tllm_core.world.channel import Launch


class StartUp:
    """Follows the phases of a world that is not ready yet."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._phase = Phase(0, "starting")
        self._since = time.monotonic()

    def note(self, phase: Phase) -> None:
        if (phase.rank, phase.name) != (self._phase.rank, self._phase.name):
            self._since = time.monotonic()
        self._phase = phase

    def stall(self) -> str | None:
        """A line for stderr once the present phase has taken longer than `stall_report_s`."""
        limit = self._launch.stall_report_s
        if limit is None or time.monotonic() - self._since < limit:
            return None
        return f"tllm: still starting: {self._where()}\n"

    def given_up(self) -> str:
        """Why the world was given up after `ready_timeout_s`."""
        return f"the engine was not ready within {self._launch.ready_timeout_s:g} s (ready_timeout_s); {self._where()}"

    def _where(self) -> str:
        done = "" if self._phase.done is None else f" ({self._phase.done:.0%} done)"
        return f"rank {self._phase.rank} has been {self._phase.name!r}{done} for {time.monotonic() - self._since:.0f} s"
