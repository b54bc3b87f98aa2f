"""A state machine over submit, step, abort, kill, freeze, cut and restart, against a model of what each request may have."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tllm_core.conformance.case import case
from tllm_core.conformance.faults import Detour, EngineProcess
from tllm_core.conformance.transport.streams import check_free, check_tokens
from tllm_core.conformance.transport.subject import PATIENCE_S, TransportSubject
from tllm_core.contracts.interfaces import Capability
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import EngineDeadError
from tllm_core.executor import GenerationExecutor
from tllm_core.ledger.result import GenerationResult

EXAMPLES, STEPS = 6, 14
DETOURED = Capability.MANY_FRONTENDS | Capability.RECONNECTS | Capability.CROSS_PROCESS
LENGTHS = strategies.sampled_from([1, 3, 40, 150])


class Asked:
    """The model of one request: what it may still have. `ends`: how it may end."""

    def __init__(self, result: GenerationResult, length: int) -> None:
        self.result, self.length = result, length
        self.ends = {"length"}
        self.tokens: list[int] = []
        self.outcome = ""

    def step(self) -> None:
        """Takes the next update; a second outcome, or one that can't be, is a failure."""
        if self.outcome == "dead":
            with pytest.raises(EngineDeadError):
                next(self.result)
            return
        if self.outcome:
            assert list(self.result) == [], "something came after the terminal outcome"
            return
        try:
            update = next(self.result)
        except EngineDeadError:
            self._end("dead")
            return
        output = update.outputs[0]
        self.tokens += output.token_ids_diff
        if output.finish_reason is not None:
            self._end(output.finish_reason)

    def _end(self, outcome: str) -> None:
        assert outcome in self.ends, f"it ended by {outcome!r}, and may end by {sorted(self.ends)}"
        self.outcome = outcome
        if outcome == "length":
            assert len(self.tokens) == self.length, "it finished without all of its tokens"


class StatefulCases(TransportSubject):
    """Faults in any order."""

    @case("I1", "I2", "I3", timeout_s=150.0)
    def test_any_order_of_faults_keeps_the_invariants(self) -> None:
        """Whatever the order of submits, steps, aborts, kills, freezes, cuts and restarts: one outcome, exact prefixes.

        If this fails: the last lines of the report are the shortest order of events that was found.
        """
        suite = self

        class Machine(_Machine):
            def __init__(self) -> None:
                super().__init__(suite)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                derandomize=True,
                database=None,
                deadline=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )
        self.end_world()


class _Machine(RuleBasedStateMachine):
    """Runs against the suite's shared world; a kill gets it another."""

    def __init__(self, suite: TransportSubject) -> None:
        super().__init__()
        self.suite = suite
        self.asked: list[Asked] = []
        self.number = 0
        self.own = contextlib.ExitStack()
        self._begin()

    def _begin(self) -> None:
        self.world: EngineProcess = self.suite.world()
        self.detour: Detour | None = None
        self.frontend: GenerationExecutor = self.world.owner
        if self.suite.claims(DETOURED):
            detour = self.own.enter_context(Detour())
            detour.turn(self.world.address)
            if detour.proxies:
                self.detour = detour
                self.frontend = self.world.attach(options=self.suite.options_through(detour), through=detour)
        elif self.suite.claims(Capability.MANY_FRONTENDS):
            self.frontend = self.world.attach()

    @rule(length=LENGTHS)
    def submit(self, length: int) -> None:
        self.number += 1
        result = self.frontend.generate_async([self.number, 4], SamplingParams(max_tokens=length))
        self.asked.append(Asked(result, length))

    @precondition(lambda self: self.asked)
    @rule(which=strategies.integers(0, 30), count=strategies.integers(1, 5))
    def step(self, which: int, count: int) -> None:
        for _ in range(count):
            self.asked[which % len(self.asked)].step()

    @precondition(lambda self: self.asked)
    @rule(which=strategies.integers(0, 30))
    def abort(self, which: int) -> None:
        asked = self.asked[which % len(self.asked)]
        asked.result.abort()
        asked.ends |= {"abort"}

    @precondition(lambda self: self.detour is not None)
    @rule()
    def cut(self) -> None:
        assert self.detour is not None
        self.detour.cut()
        self.detour.heal()

    @precondition(lambda self: self.suite.claims(Capability.CROSS_PROCESS))
    @rule()
    def freeze_and_thaw(self) -> None:
        self.world.freeze()
        self.world.thaw()

    @precondition(lambda self: type(self.suite).broker is not None and self.suite.claims(DETOURED))
    @rule()
    def restart_the_broker(self) -> None:
        broker = type(self.suite).broker
        assert broker is not None
        broker.restart()

    @precondition(lambda self: self.suite.claims(Capability.CROSS_PROCESS) and len(self.asked) > 1)
    @rule()
    def kill(self) -> None:
        for asked in self.asked:
            asked.ends |= {"dead"}
        self.world.kill()
        self._settle()
        assert self.frontend.wait_ended(PATIENCE_S)
        self.suite.end_world()
        self.asked.clear()
        self._begin()

    @invariant()
    def received_is_a_prefix(self) -> None:
        for asked in self.asked:
            check_tokens(asked.tokens, asked.result.prompt_token_ids)

    def _settle(self) -> None:
        """I1: everything ends, without any further doing."""
        for asked in self.asked:
            while not asked.outcome:
                asked.step()
            asked.step()
        self.received_is_a_prefix()

    def teardown(self) -> None:
        try:
            self._settle()
            if self.frontend is not self.world.owner:
                self.frontend.shutdown(5.0)
            check_free(self.world)
        finally:
            self.own.close()
