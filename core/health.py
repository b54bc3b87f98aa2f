"""What a frontend knows of its engine now: alive, reachable, and getting on with its work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from tllm_core.contracts.interfaces import PortState
from tllm_core.errors import ExecutorClosedError, TllmError
from tllm_core.wire.liveness import DEFAULT_LIVENESS

if TYPE_CHECKING:
    from tllm_core.frontend import Frontend


class RankHealth(Struct, frozen=True):
    """state: "running", "stopped" or "gone" as of the last beat; "unknown" where nothing beats."""

    rank: int
    pid: int
    state: str


class PathHealth(Struct, frozen=True):
    """This side's way to the engine: its connection, or its broker's. reason, down_s: why not, and for how long, if known."""

    up: bool
    reason: str = ""
    down_s: float | None = None


PATH_UP = PathHealth(True)


class Health(Struct, frozen=True):
    """What is known without asking anybody. It is as fresh as the last beat (`beat_interval_s`, 0.1 s by default).

    state: "ready" until the engine, or the lane to it, is lost for good. cause: why, if not ready. in_flight: requests of this
    frontend. last_result_age_s: since the last step batch. last_step_age_s: how long the engine has been in its present step,
    None while it has nothing to do (or is paused, or runs a control call), and where nothing beats (the inline launcher).
    hung: the words of the hang rule while it holds (`hang_after_s`), None once the engine goes on; it is no death by itself.
    path: whether the engine can be reached now; an outage is waited out for `broker_down_after_s` before it is a loss.
    """

    state: Literal["ready", "dead", "closed"]
    cause: str | None
    in_flight: int
    last_result_age_s: float | None
    ranks: tuple[RankHealth, ...]
    counters: dict[str, int]
    last_step_age_s: float | None = None
    hung: str | None = None
    path: PathHealth = PATH_UP

    @property
    def ok(self) -> bool:
        """Alive, reachable and getting on: requests may be sent here."""
        return self.state == "ready" and self.hung is None and self.path.up

    @property
    def reason(self) -> str | None:
        """Why it is not `ok`, in words; None where it is."""
        if self.state != "ready":
            return self.cause
        return self.hung or (None if self.path.up else f"there is no path to the engine: {self.path.reason}")


def health_of(frontend: Frontend, foreign: TllmError | None = None) -> Health:
    """Reads what the frontend's threads have taken in. foreign: what every call raises, in a fork of its process."""
    closed = frontend.ledger.closed
    # What pending results were ended with; a verdict that came after that is nobody's cause.
    error = foreign or (frontend.verdict if closed is None else closed.error)
    state: Literal["ready", "dead", "closed"] = "ready"
    if error is not None:
        state = "closed" if isinstance(error, ExecutorClosedError) else "dead"
    liveness = frontend.liveness if error is None else None
    hung = None if liveness is None else liveness.hung
    return Health(
        state=state,
        cause=None if error is None else str(error),
        in_flight=frontend.ledger.in_flight,
        last_result_age_s=frontend.last_batch_age_s(),
        ranks=tuple(RankHealth(i.rank, i.pid, frontend.rank_state(i.rank)) for i in frontend.ranks),
        counters={**frontend.link.counters, **frontend.ledger.counters},
        last_step_age_s=None if liveness is None else liveness.last_step_age_s,
        hung=None if hung is None else hung.message,
        path=_path_of(frontend) if error is None else PATH_UP,
    )


def _path_of(frontend: Frontend) -> PathHealth:
    liveness = DEFAULT_LIVENESS if frontend.liveness is None else frontend.liveness.settings
    state, ok_at = frontend.link.path()
    return path_health(state, ok_at, time.monotonic(), 2 * liveness.dead_after_s)


def path_health(state: PortState, ok_at: float, now: float, stale_s: float) -> PathHealth:
    """A port that says that it is down is believed; one that has had no proof for `stale_s` seconds (a broker that froze keeps
    its connections) is not."""
    if not state.up:
        return PathHealth(
            False, state.reason or "the port is down", max(0.0, now - state.since) if state.since else None
        )
    if now - ok_at > stale_s:
        return PathHealth(False, "nothing has come back on it", now - ok_at)
    return PATH_UP
