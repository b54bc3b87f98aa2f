"""Deadlines that only count silence which this side could have heard, and facts that rank states are."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tllm_core.contracts.messages import Beat, RankState
from tllm_core.wire.liveness import STACKS_S, Liveness, LivenessSettings, Silence

RUNNING, STOPPED, GONE = RankState.RUNNING, RankState.STOPPED, RankState.GONE
RULES = LivenessSettings(
    beat_interval_s=0.1,
    dead_after_s=1.0,
    hang_after_s=5.0,
    broker_down_after_s=10.0,
    reconnect_grace_s=2.0,
)


class Watch:
    """A frontend that polls every 0.1 s; what happens besides is told by keywords."""

    def __init__(self, rules: LivenessSettings = RULES) -> None:
        self.now = self.path_ok_at = 1000.0
        self.liveness = Liveness(rules)
        self.number = 0

    def beat(self, steps=0, busy=False, states=(RUNNING, RUNNING), cpu_s=(0.0, 0.0)) -> bool:
        self.number += 1
        return self.liveness.beat(Beat(self.number, steps, busy, states, cpu_s), self.now)

    def run(self, seconds: float, *, beats: bool = True, path: bool = True, **beat):
        """The first verdict within `seconds`, or None."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if path:
                self.path_ok_at = self.now
            if beats:
                self.beat(**beat)
            verdict = self.liveness.poll(self.now, self.path_ok_at)
            if verdict is not None:
                return verdict
        return None


def test_a_world_that_beats_is_alive() -> None:
    assert Watch().run(60) is None


def test_silence_is_a_death_within_its_deadline() -> None:
    watch = Watch()
    watch.run(5)
    began = watch.now
    verdict = watch.run(5, beats=False)
    assert verdict is not None
    assert verdict.kind == "silent"
    assert RULES.dead_after_s < watch.now - began <= RULES.dead_after_s + 0.2
    assert "1 s" in str(verdict.cause())


def test_a_world_that_never_beats_is_dead_too() -> None:
    watch = Watch()
    verdict = watch.run(3, beats=False)
    assert verdict is not None
    assert verdict.kind == "silent"


def test_the_first_verdict_stays() -> None:
    watch = Watch()
    first = watch.run(3, beats=False)
    assert watch.run(3) == first


def test_beats_count_only_if_their_number_rises() -> None:
    watch = Watch()
    watch.run(2)
    last = watch.number
    assert not watch.liveness.beat(Beat(last, 0, False), watch.now)
    verdict = None
    for _ in range(20):
        verdict = verdict or watch.run(0.1, beats=False)
        watch.liveness.beat(Beat(last - 1, 0, False), watch.now)
    assert verdict is not None
    assert verdict.kind == "silent"


def test_a_judge_that_was_frozen_itself_judges_nobody() -> None:
    watch = Watch()
    watch.run(2)
    watch.now += 60
    watch.path_ok_at = watch.now
    assert watch.liveness.poll(watch.now, watch.path_ok_at) is None
    assert watch.run(0.8, beats=False) is None
    assert watch.run(2) is None


def test_a_judge_that_was_frozen_still_notices_a_death_afterwards() -> None:
    watch = Watch()
    watch.run(2)
    watch.now += 60
    verdict = watch.run(1.5, beats=False)
    assert verdict is not None
    assert verdict.kind == "silent"


def test_silence_on_a_path_that_is_down_is_no_death() -> None:
    watch = Watch()
    watch.run(2)
    assert watch.run(9, beats=False, path=False) is None
    # Back, but the peer needs a moment to be heard again.
    assert watch.run(2.5, beats=False) is None
    assert watch.run(5) is None


def test_after_the_grace_a_death_is_noticed() -> None:
    watch = Watch()
    watch.run(2)
    watch.run(5, beats=False, path=False)
    verdict = watch.run(RULES.reconnect_grace_s + RULES.dead_after_s + 0.3, beats=False)
    assert verdict is not None
    assert verdict.kind == "silent"


def test_a_path_that_stays_down_is_a_lost_broker_and_no_death() -> None:
    watch = Watch()
    watch.run(2)
    verdict = watch.run(12, beats=False, path=False)
    assert verdict is not None
    assert verdict.kind == "broker_down"
    assert verdict.rank is None


def run_with_late_proofs(watch: Watch, seconds: float, *, beats: bool):
    """Each proof of the path takes 0.8 s: what it proves is the time at which it was asked for."""
    for _ in range(round(seconds / 0.8)):
        asked_at = watch.now
        verdict = watch.run(0.8, beats=beats, path=False)
        if verdict is not None:
            return verdict
        watch.path_ok_at = asked_at
    return None


def test_late_proofs_are_neither_a_death_nor_a_lost_broker_while_beats_come() -> None:
    watch = Watch()
    watch.run(2)
    assert run_with_late_proofs(watch, 60, beats=True) is None


def test_a_peer_that_falls_silent_while_proofs_are_late_is_given_up_all_the_same() -> None:
    """Each late proof begins the deadline for silence anew, as a path that came back does."""
    watch = Watch()
    watch.run(2)
    began = watch.now
    verdict = run_with_late_proofs(watch, 60, beats=False)
    assert verdict is not None
    assert verdict.kind == "broker_down"
    assert watch.now - began == pytest.approx(RULES.broker_down_after_s, abs=0.3)


def test_own_freeze_is_no_lost_broker() -> None:
    watch = Watch()
    watch.run(2)
    watch.now += 60
    assert watch.run(5, path=False) is None


def test_an_announced_end_disarms() -> None:
    watch = Watch()
    watch.run(2)
    watch.liveness.disarm()
    assert watch.run(30, beats=False, path=False) is None


def test_a_rank_that_is_gone_is_named_at_once() -> None:
    watch = Watch()
    watch.run(1)
    verdict = watch.run(0.1, states=(RUNNING, GONE))
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("gone", 1)
    assert verdict.cause().rank == 1


def test_a_stopped_rank_is_named_within_the_deadline() -> None:
    watch = Watch()
    watch.run(1)
    began = watch.now
    verdict = watch.run(2, states=(STOPPED, RUNNING))
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("stopped", 0)
    assert watch.now - began < RULES.dead_after_s


def test_a_rank_that_a_debugger_samples_is_no_death() -> None:
    watch = Watch()
    for _ in range(30):
        assert watch.run(0.3, states=(STOPPED, RUNNING)) is None
        assert watch.run(0.1) is None


def test_work_without_steps_and_cpu_time_is_a_hang_that_names_the_rank() -> None:
    watch = Watch()
    watch.run(1)
    assert watch.run(4.5, steps=7, busy=True, cpu_s=(1.02, 1.0)) is None
    assert watch.liveness.hung is None
    assert watch.run(1, steps=7, busy=True, cpu_s=(1.02, 1.0)) is None
    hung = watch.liveness.hung
    assert hung is not None
    assert (hung.kind, hung.rank) == ("hung", 0)
    watch.run(0.1, steps=8, busy=True, cpu_s=(1.02, 1.0))
    assert watch.liveness.hung is None


def test_a_hang_ends_the_world_where_that_is_configured() -> None:
    watch = Watch(LivenessSettings(hang_after_s=5.0, end_hung=True))
    watch.run(1)
    began = watch.now
    verdict = watch.run(10, steps=7, busy=True, cpu_s=(1.0, 1.0))
    assert verdict is not None
    assert verdict.kind == "hung"
    assert watch.now - began == pytest.approx(5.0 + STACKS_S, abs=0.3), (
        "the watcher, which goes by `hung`, speaks first"
    )


def test_the_age_of_the_last_step_counts_while_work_is_pending() -> None:
    watch = Watch()
    assert watch.liveness.last_step_age_s is None
    watch.run(3, steps=7)
    assert watch.liveness.last_step_age_s is None
    watch.run(2, steps=7, busy=True)
    assert watch.liveness.last_step_age_s == pytest.approx(2.0, abs=0.05)
    watch.run(0.1, steps=8, busy=True)
    assert watch.liveness.last_step_age_s == 0
    for second in range(30):
        watch.run(1, steps=8, busy=True, cpu_s=(float(second), 0.0))
    assert watch.liveness.last_step_age_s == pytest.approx(30.0, abs=0.05), "computing is no step"
    assert watch.liveness.hung is None
    watch.run(0.1, steps=9)
    assert watch.liveness.last_step_age_s is None


@pytest.mark.parametrize("busy", [True, False])
def test_computing_or_idle_is_no_hang(busy) -> None:
    watch = Watch()
    for second in range(120):
        watch.run(1, steps=7, busy=busy, cpu_s=(1.0, second / 2 if busy else 1.0))
        assert watch.liveness.hung is None


def test_a_world_whose_cpu_time_is_unknown_hangs_without_a_rank() -> None:
    watch = Watch()
    watch.run(7, steps=7, busy=True, states=(), cpu_s=())
    assert watch.liveness.hung is not None
    assert watch.liveness.hung.rank is None


class Judge(RuleBasedStateMachine):
    """A peer that is alive is never judged silent, whatever happens to the path and to the judge."""

    def __init__(self) -> None:
        super().__init__()
        self.silence = Silence(1.0, 1.0)
        self.now = self.path_ok_at = 50.0
        self.up = True
        self.verdict = False
        self.silence.is_over(self.now, self.path_ok_at)

    def poll(self, heard: bool) -> None:
        if self.up:
            self.path_ok_at = self.now
            if heard:
                self.silence.heard(self.now)
        self.verdict = self.silence.is_over(self.now, self.path_ok_at)

    @rule(turns=st.integers(1, 40))
    def live(self, turns: int) -> None:
        for _ in range(turns):
            self.now += 0.1
            self.poll(heard=True)

    @rule(seconds=st.floats(0.1, 100))
    def freeze(self, seconds: float) -> None:
        self.now += seconds
        self.poll(heard=False)

    @rule(up=st.booleans())
    def cut_or_mend(self, up: bool) -> None:
        self.up = up

    @invariant()
    def nobody_alive_is_judged(self) -> None:
        assert not self.verdict

    def teardown(self) -> None:
        """And a peer that dies is judged in a bounded time."""
        self.up = True
        for _ in range(32):
            self.now += 0.1
            self.poll(heard=False)
        assert self.verdict


Judge.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, database=None)
TestJudge = Judge.TestCase


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dead_after_s": 0.1}, "dead_after_s must be at least twice beat_interval_s, which is 0.1"),
        ({"frontend_dead_after_s": 3.0}, "frontend_dead_after_s must be at least twice frontend_beat_s, which is 2"),
    ],
)
def test_a_deadline_that_one_late_beat_breaks_is_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        LivenessSettings(**settings)
