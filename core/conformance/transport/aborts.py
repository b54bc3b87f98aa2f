"""Aborts in every phase: exactly one terminal outcome, and the engine is free again."""

from __future__ import annotations

import random
import threading

from tllm_core.conformance.case import case
from tllm_core.conformance.transport.streams import ask, check, check_free, check_tokens
from tllm_core.conformance.transport.subject import LONG, PATIENCE_S, TransportSubject, until
from tllm_core.contracts.interfaces import Capability
from tllm_core.contracts.messages import SamplingParams
from tllm_core.ledger.result import GenerationResult

STREAM = SamplingParams(max_tokens=LONG)


def check_one_outcome(result: GenerationResult, reason: str) -> None:
    """It ended with this reason, once, in every sequence, and stays so."""
    assert result.result(PATIENCE_S) is result
    assert len(list(result)) <= 2
    assert list(result) == []
    assert [output.finish_reason for output in result.outputs] == [reason] * len(result.outputs)
    for output in result.outputs:
        assert len(output.token_ids) == output.length
        check_tokens(output.token_ids, result.prompt_token_ids, output.index)


class AbortCases(TransportSubject):
    """A request ends when it is told to, once, whatever it is doing."""

    @case("I1", "I6")
    def test_abort_before_it_is_sent(self) -> None:
        """Requests that still wait on the caller's side, since the window is full, end as aborted at once.

        If this fails: an abort overtakes its request, or gets lost in front of a full window.
        """
        world = self.world()
        call = threading.Thread(target=world.owner.control, args=("sleep_for", 0.5))
        call.start()
        until(lambda: len(world.owner._frontend.ledger) == 1, "the engine was asked to sleep")
        results = [world.owner.generate_async([number + 1], STREAM) for number in range(100)]
        for result in results:
            result.abort()
        for result in results:
            check_one_outcome(result, "abort")
            assert result.outputs[0].token_ids == []
        call.join()
        check_free(world)

    @case("I1", "I6")
    def test_abort_while_it_waits_in_the_engine(self) -> None:
        """Requests that the engine has not begun end as aborted, without a token, and leave its queue.

        If this fails: aborts do not reach the engine, or not in order.
        """
        world = self.world()
        world.owner.control("pause")
        results = [world.owner.generate_async([number + 1], STREAM) for number in range(16)]
        until(lambda: world.owner.stats().waiting == 16, "they wait")
        for result in results:
            result.abort()
            check_one_outcome(result, "abort")
            assert result.outputs[0].token_ids == []
        check_free(world)
        world.owner.control("resume")
        ask(world.owner, [4, 5])

    @case("I1", "I2", "I3")
    def test_abort_in_mid_stream(self) -> None:
        """A stream that is aborted ends with exactly a prefix of its tokens; one of n sequences ends in all of them.

        If this fails: tokens arrive after the end, or the engine goes on.
        """
        world = self.world()
        results = [world.owner.generate_async([number + 1, 3], STREAM) for number in range(8)]
        several = world.owner.generate_async([1, 2], SamplingParams(n=4, max_tokens=LONG))
        kept = world.owner.generate_async([9, 9], SamplingParams(max_tokens=300))
        for result in (*results, several):
            next(result)
        for result in (*results, several):
            result.abort()
            check_one_outcome(result, "abort")
        check(kept, 300)
        check_free(world)

    @case("I3", "I6")
    def test_abort_after_the_end_twice_and_of_unknown_ids_is_quiet(self) -> None:
        """An abort of what has ended, was aborted or never was changes nothing.

        If this fails: a late abort hits another request, or the engine.
        """
        world = self.world()
        result = world.owner.generate_async([1], SamplingParams(max_tokens=3))
        result.result(PATIENCE_S)
        for client_id in (result.client_id, result.client_id, 0, 1 << 62, -1):
            world.owner.abort(client_id)
        check_one_outcome(result, "length")
        ask(world.owner, [2])
        check_free(world)

    @case("I1", "I2")
    def test_abort_in_the_tick_of_the_finish(self) -> None:
        """Whichever is first decides; a finish that won has all of its tokens. 60 races.

        If this fails: a request has two outcomes, or none.
        """
        world, dice = self.world(), random.Random(7)
        for number in range(60):
            count = dice.randint(1, 4)
            result = world.owner.generate_async([number + 1, 1], SamplingParams(max_tokens=count))
            if dice.random() < 0.5:
                next(result)
            result.abort()
            reason = str(result.result(PATIENCE_S).outputs[0].finish_reason)
            assert reason in ("length", "abort")
            check_one_outcome(result, reason)
            assert result.outputs[0].length == count or reason == "abort"
        check_free(world)

    @case("I1")
    def test_a_deadline_ends_what_runs_and_what_waits(self) -> None:
        """A request's own `timeout_s` ends it with "timeout", wherever it is.

        If this fails: deadlines do not cross, or their end does not come back.
        """
        world = self.world()
        running = world.owner.generate_async([1, 7], STREAM, timeout_s=0.4)
        check_one_outcome(running, "timeout")
        world.owner.control("pause")
        waiting = world.owner.generate_async([2, 7], STREAM, timeout_s=0.2)
        check_one_outcome(waiting, "timeout")
        world.owner.control("resume")
        check_free(world)

    @case("I1", "I6", needs=Capability.MANY_FRONTENDS)
    def test_a_frontend_that_leaves_has_its_requests_aborted_and_nobody_elses(self) -> None:
        """A frontend that is shut down takes its own requests with it; those of others finish.

        If this fails: Goodbye gets lost, or one frontend's end is another's.
        """
        world = self.world()
        leaving = world.attach()
        results = [leaving.generate_async([number + 1], STREAM) for number in range(4)]
        for result in results:
            next(result)
        kept = world.owner.generate_async([9, 1], SamplingParams(max_tokens=300))
        leaving.shutdown(5.0)
        check(kept, 300)
        check_free(world)
