"""What the owner of a world sees for itself until Ready, since a watcher that stands still tells nothing."""

import contextlib
import sys
import time
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, Identity, Phase, Ready, WorldEvent
from tllm_core.world.process import is_stopped
from tllm_core.world.startup import StartUp

SILENT_S = 2.0
"""How long nothing may be heard of a watcher, which beats, before people are told that too."""


class Lookout:
    """Looked from again and again while a world starts. It depends on no process of that world.

    stopped_s: how long the watcher may be seen stopped; a debugger that samples it stops it for an instant.
    stall_report_s: how long one phase may take before stderr says so; None = silence.
    """

    def __init__(self, watcher: Identity, stopped_s: float, stall_report_s: float | None) -> None:
        self._watcher, self._stopped_s, self._stall_report_s = watcher, stopped_s, stall_report_s
        self._start_up = StartUp()
        self._stopped_since = self._looked_at = self._heard_at = time.monotonic()
        self._is_over = False

    def note(self, events: Sequence[WorldEvent]) -> None:
        """What the world has said."""
        for event in events:
            self._heard_at = time.monotonic()
            if isinstance(event, Phase):
                self._start_up.note(event)
            elif isinstance(event, Beaten):
                self._start_up.note_states(event.beat.states)
            elif isinstance(event, Ready | Failed | Exited):
                self._is_over = True

    def look(self) -> Failed | None:
        """Why the start has failed, once; None while it has not. Says on stderr what takes long."""
        if self._is_over:
            return None
        now, stopped = time.monotonic(), is_stopped(self._watcher)
        # Looks that are far apart mean that this process was frozen itself, and saw nothing of what was in between.
        if not stopped or now - self._looked_at > self._stopped_s:
            self._stopped_since = now
        self._looked_at = now
        self._tell_stall(self._of_watcher(stopped, now))
        if now - self._stopped_since < self._stopped_s:
            return None
        self._is_over = True
        return Failed("the engine's watcher is stopped (SIGSTOP, or a debugger)")

    def _of_watcher(self, stopped: bool, now: float) -> str:
        if stopped:
            return "; its watcher is stopped"
        silent_s = now - self._heard_at
        return f"; its watcher has not been heard of for {silent_s:.0f} s" if silent_s > SILENT_S else ""

    def _tell_stall(self, of_watcher: str) -> None:
        words = None if self._stall_report_s is None else self._start_up.stall(self._stall_report_s)
        if words is not None and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                print(f"tllm: {words}{of_watcher}", file=sys.stderr, flush=True)
