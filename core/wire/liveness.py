"""Who is alive: beats, deadlines, freeze and hang rules. Sans-IO: times and beats are passed in, verdicts come out."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from tllm_core.contracts.messages import Beat, RankState
from tllm_core.errors import Cause
from tllm_core.wire.path import PathWatch

Seconds = Annotated[float, Meta(gt=0, le=86400)]


class LivenessSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[liveness]`. All in seconds.

    beat_interval_s: how often the watcher says that it is there. dead_after_s: silence that counts as death.
    hang_after_s: no step with work pending, and no CPU time used. end_hung: such an engine counts as dead. error_budget: so many
    requests that the engine failed in steps within error_budget_window_s count as its death too; None = no number does.
    broker_down_after_s: how long the own path may be without proof. reconnect_grace_s: how long nobody is judged after the
    path came back. frontend_dead_after_s: silence after which an engine gives a frontend up. frontend_beat_s: how often a
    frontend says that it is there.
    """

    beat_interval_s: Seconds = 0.1
    dead_after_s: Seconds = 1.0
    hang_after_s: Seconds = 60.0
    end_hung: bool = False
    error_budget: Annotated[int, Meta(ge=1)] | None = None
    error_budget_window_s: Seconds = 60.0
    broker_down_after_s: Seconds = 10.0
    reconnect_grace_s: Seconds = 1.0
    frontend_dead_after_s: Seconds = 10.0
    frontend_beat_s: Seconds = 2.0

    def __post_init__(self) -> None:
        """A deadline that one late beat breaks would find the living dead."""
        for deadline, interval in (("dead_after_s", "beat_interval_s"), ("frontend_dead_after_s", "frontend_beat_s")):
            if getattr(self, deadline) < 2 * getattr(self, interval):
                raise ValueError(f"{deadline} must be at least twice {interval}, which is {getattr(self, interval):g}")


DEFAULT_LIVENESS = LivenessSettings()

STACKS_S = 2.0
"""How much longer others wait before they give a hung engine up than its watcher, which has it tell its stacks first."""

IDLE_CPU_S, IDLE_CPU_SHARE = 0.05, 0.01
"""What the idle threads of a waiting process may use: seconds, and seconds per second."""

VerdictKind: TypeAlias = Literal["silent", "stopped", "gone", "hung", "broker_down"]


class Verdict(Struct, frozen=True):
    """Why the peer counts as lost. `rank`: the one that it is about, where it is about one."""

    kind: VerdictKind
    message: str
    rank: int | None = None

    def cause(self) -> Cause:
        return Cause(self.message, rank=self.rank)


class Silence:
    """Judges how long one peer has been silent. Poll it after everything that had arrived was taken.

    Only silence during which the own path was proven counts, and only while this side itself was awake: polls more than half
    a deadline apart, or a path that came back, begin the deadline anew.
    """

    __slots__ = ("_grace_s", "_path_ok_at", "_polled_at", "_since", "after_s")

    def __init__(self, after_s: float, grace_s: float) -> None:
        self.after_s, self._grace_s = after_s, grace_s
        self._since: float | None = None
        self._polled_at = self._path_ok_at = 0.0

    def heard(self, now: float) -> None:
        """The peer gave a fresh sign of life at `now`."""
        if self._since is not None and now > self._since:
            self._since = now

    def is_over(self, now: float, path_ok_at: float) -> bool:
        """Whether the peer has been silent for longer than it may be."""
        if self._since is None or now - self._polled_at > self.after_s / 2:
            self._since = now
        elif path_ok_at - self._path_ok_at > self.after_s / 2:
            self._since = max(self._since, now + self._grace_s)
        self._polled_at, self._path_ok_at = now, path_ok_at
        return min(now, path_ok_at) - self._since > self.after_s


class Liveness:
    """A frontend's judgement of one engine world, from its watcher's beats. The first verdict stays."""

    def __init__(self, settings: LivenessSettings = DEFAULT_LIVENESS) -> None:
        self.settings = settings
        self._silence = Silence(settings.dead_after_s, settings.reconnect_grace_s)
        self._path = PathWatch(settings.broker_down_after_s)
        self._proven_at = self._heard_at = 0.0
        self._armed = True
        self._number = -1
        self._fact: Verdict | None = None
        self._stopped_since: dict[int, float] = {}
        self._stopped_at = 0.0
        self._progress: Progress | None = None

    def beat(self, beat: Beat, now: float) -> bool:
        """Takes a beat at monotonic time `now`; False if it is not newer than the last one."""
        if beat.number <= self._number:
            return False
        self._number = beat.number
        self._silence.heard(now)
        self._heard_at = now
        self._note_states(beat, now)
        if self._progress is None:
            self._progress = Progress(now, beat)
        self._progress.note(beat, now)
        return True

    def poll(self, now: float, path_ok_at: float) -> Verdict | None:
        """Judges after everything that had arrived was taken. `path_ok_at`: when the own path was last proven to work."""
        if not self._armed:
            return None
        silent = self._silence.is_over(now, path_ok_at)
        if self._fact is None:
            self._fact = self._stopped_for_long() or self._path_verdict(now, path_ok_at)
        if self._fact is None and silent:
            self._fact = Verdict("silent", f"the engine has not been heard of for {self.settings.dead_after_s:g} s")
        if self._fact is None and self.settings.end_hung:
            self._fact = self._hang(self.settings.hang_after_s + STACKS_S)
        return self._fact

    def disarm(self) -> None:
        """An orderly end was announced: silence is no death any more."""
        self._armed = False

    @property
    def hung(self) -> Verdict | None:
        """Set while work is pending and neither a step was done nor CPU time was used for `hang_after_s`. No death by itself."""
        return self._hang(self.settings.hang_after_s)

    def _hang(self, after_s: float) -> Verdict | None:
        return None if self._progress is None else self._progress.hang(after_s)

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds from the last step to the last beat; None where no work is pending, or nothing was heard yet."""
        return None if self._progress is None else self._progress.step_age_s

    def _note_states(self, beat: Beat, now: float) -> None:
        for rank, state in enumerate(beat.states):
            if state == RankState.GONE and self._fact is None:
                self._fact = Verdict("gone", f"engine rank {rank} is gone", rank)
            if state == RankState.STOPPED:
                self._stopped_since.setdefault(rank, now)
            else:
                self._stopped_since.pop(rank, None)
        self._stopped_at = now

    def _stopped_for_long(self) -> Verdict | None:
        """A debugger that samples a process stops it for an instant, so one beat that says so is not enough."""
        for rank, since in self._stopped_since.items():
            if self._stopped_at - since >= self.settings.dead_after_s / 2:
                return Verdict("stopped", f"engine rank {rank} is stopped (SIGSTOP, or a debugger)", rank)
        return None

    def _path_verdict(self, now: float, path_ok_at: float) -> Verdict | None:
        # A proof that is late each time begins the deadline for silence anew each time, so that only beats tell of a path.
        if now - path_ok_at <= self.settings.dead_after_s / 2:
            self._proven_at = path_ok_at
        down_s = self._path.lost_for_s(now, max(self._proven_at, self._heard_at))
        if down_s is None:
            return None
        return Verdict("broker_down", f"there has been no path to the engine for {down_s:.1f} s")


class Progress:
    """The last beat that showed progress, and the latest one. Its answers may be asked for from any thread."""

    __slots__ = ("_latest", "_mark", "_stepped_at")

    def __init__(self, at: float, mark: Beat) -> None:
        self._mark = self._latest = (at, mark)
        self._stepped_at = at

    def note(self, beat: Beat, now: float) -> None:
        _, before = self._latest
        if not beat.busy or beat.steps != before.steps:
            self._stepped_at = now
        if self._is_made_by(beat, now):
            self._mark = (now, beat)
        self._latest = (now, beat)

    @property
    def step_age_s(self) -> float | None:
        at, beat = self._latest
        return max(0.0, at - self._stepped_at) if beat.busy else None

    def _is_made_by(self, beat: Beat, now: float) -> bool:
        """A step, nothing to do, or more CPU time than an idle process uses."""
        # The sum falls where a rank's child ends that nobody had waited for: a sign of life too.
        at, mark = self._mark
        if not beat.busy or beat.steps != mark.steps or len(beat.cpu_s) != len(mark.cpu_s):
            return True
        return abs(sum(beat.cpu_s) - sum(mark.cpu_s)) > IDLE_CPU_S + IDLE_CPU_SHARE * (now - at)

    def hang(self, after_s: float) -> Verdict | None:
        (at, mark), (latest_at, latest) = self._mark, self._latest
        if latest_at - at < after_s:
            return None
        used = [cpu_s - before for cpu_s, before in zip(latest.cpu_s, mark.cpu_s, strict=False)]
        rank = used.index(min(used)) if used else None
        who = "the engine" if rank is None else f"engine rank {rank}"
        return Verdict("hung", f"{who} has work and made no step and used no CPU time for {latest_at - at:.1f} s", rank)
