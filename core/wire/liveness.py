"""Who is alive: beats, deadlines, freeze and hang rules. Sans-IO: times and beats are passed in, verdicts come out."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from tllm_core.contracts.messages import Beat
from tllm_core.errors import Cause

Seconds = Annotated[float, Meta(gt=0, le=86400)]


class LivenessSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[liveness]`. All in seconds.

    beat_interval_s: how often the watcher says that it is there. dead_after_s: silence that counts as death.
    hang_after_s: no step with work pending, and no CPU time used. broker_down_after_s: how long the own path may be without
    proof. reconnect_grace_s: how long nobody is judged after the path came back. frontend_dead_after_s: silence after which an
    engine gives a frontend up. frontend_beat_s: how often an idle frontend says that it is there.
    """

    beat_interval_s: Seconds = 0.1
    dead_after_s: Seconds = 1.0
    hang_after_s: Seconds = 60.0
    broker_down_after_s: Seconds = 10.0
    reconnect_grace_s: Seconds = 1.0
    frontend_dead_after_s: Seconds = 10.0
    frontend_beat_s: Seconds = 2.0


DEFAULT_LIVENESS = LivenessSettings()

VerdictKind: TypeAlias = Literal["silent", "stopped", "gone", "hung", "broker_down"]


class Verdict(Struct, frozen=True):
    """Why the peer counts as lost. `rank`: the one that it is about, where it is about one."""

    kind: VerdictKind
    message: str
    rank: int | None = None

    def cause(self) -> Cause:
        return Cause(self.message, rank=self.rank)


class Liveness:
    """A frontend's judgement of one engine world, from its watcher's beats."""

    def __init__(self, settings: LivenessSettings = DEFAULT_LIVENESS) -> None:
        self.settings = settings

    def beat(self, beat: Beat, now: float) -> bool:
        """Takes a beat at monotonic time `now`; False if it is not newer than the last one."""
        raise NotImplementedError

    def poll(self, now: float, path_ok_at: float) -> Verdict | None:
        """Judges after everything that had arrived was taken. `path_ok_at`: when the own path was last proven to work."""
        raise NotImplementedError

    def disarm(self) -> None:
        """An orderly end was announced: silence is no death any more."""
        raise NotImplementedError
