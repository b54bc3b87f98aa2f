"""Whole executors: streams of many requests and frontends, and what a request or a slow reader may do to the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.faults import EngineProcess, slow_reader
from tllm_core.conformance.sequences import check_same
from tllm_core.conformance.transport.subject import BOMB, FAULTS, LONG, PATIENCE_S, POISON, TransportSubject, until
from tllm_core.contracts.interfaces import Capability
from tllm_core.contracts.messages import SamplingParams, TokenIds
from tllm_core.errors import EngineDeadError, FrameTooLarge, RequestError
from tllm_core.executor import GenerationExecutor
from tllm_core.ledger.result import GenerationResult

MIB = 1 << 20
MOST_BYTES = 20 * MIB


def expected(prompt: Sequence[int] | TokenIds, count: int, index: int = 0) -> list[int]:
    """What the echo engine answers."""
    from tllm_core.engines.echo import expected_tokens

    return expected_tokens(prompt, count, index)


def check_tokens(tokens: Sequence[int], prompt: Sequence[int] | TokenIds, index: int = 0) -> None:
    """They are the first ones, however many, of what the echo engine answers."""
    check_same(tokens, expected(prompt, len(tokens), index))


def ask(executor: GenerationExecutor, prompt: Sequence[int], count: int = 5) -> None:
    """A short request that must be answered exactly."""
    result = executor.generate_async(prompt, SamplingParams(max_tokens=count)).result(PATIENCE_S)
    check_same(result.outputs[0].token_ids, expected(prompt, count))


def check(result: GenerationResult, count: int) -> None:
    """It finished, with all of its tokens in every sequence."""
    result.result(PATIENCE_S)
    for output in result.outputs:
        check_same(output.token_ids, expected(result.prompt_token_ids, count, output.index))
        assert output.finish_reason == "length"


def check_free(world: EngineProcess) -> None:
    """Nothing is open here, and nothing runs, waits or is remembered in the engine."""
    owner = world.owner
    until(lambda: owner.health().in_flight == 0, "no request is open")
    until(lambda: owner.stats().extra["worker"]["requests"] == 0, "the engine owes nothing")
    assert (owner.stats().running, owner.stats().waiting) == (0, 0)


class StreamCases(TransportSubject):
    """Streams are exact, and nobody's trouble is another's."""

    @case("I1", "I2")
    def test_64_interleaved_streams_are_exact(self) -> None:
        """64 requests at once, of lengths from 1 to 400, each get exactly their tokens, step by step.

        If this fails: frames are lost, repeated, reordered, or reach another request, once there are many of them.
        """
        world = self.world()
        lengths = [1 + (number * 37) % 400 for number in range(64)]
        results = [
            world.owner.generate_async([number + 1, 5], SamplingParams(max_tokens=length))
            for number, length in enumerate(lengths)
        ]
        for number, (result, length) in enumerate(zip(results, lengths, strict=True)):
            tokens: list[int] = []
            for update in result:
                tokens += update.outputs[0].token_ids_diff
            check_same(tokens, expected([number + 1, 5], length))
            assert result.outputs[0].finish_reason == "length"
        several = world.owner.generate_async([3, 4], SamplingParams(n=4, max_tokens=50))
        check(several, 50)
        check_free(world)

    @case("I2", needs=Capability.MANY_FRONTENDS)
    def test_several_frontends_stream_at_once_with_different_ids(self) -> None:
        """Six frontends beside the owner, each with ten streams at once, get their own tokens alone.

        If this fails: frames reach another frontend than the one that they are for.
        """
        world = self.world()
        frontends = [world.owner, *(world.attach() for _ in range(6))]
        params = SamplingParams(max_tokens=120)
        results = [
            frontend.generate_async([1 + number, round_], params)
            for round_ in range(1, 11)
            for number, frontend in enumerate(frontends)
        ]
        for result in results:
            check(result, 120)
        assert len({result.client_id >> 48 for result in results}) == len(frontends)
        for frontend in frontends[1:]:
            frontend.shutdown(5.0)
        until(lambda: world.owner.stats().extra["worker"]["sessions"] == 1, "the sessions of those who left end")
        check_free(world)

    @case("I2", timeout_s=60.0)
    def test_large_prompts_arrive_whole(self) -> None:
        """Prompts of 1 MiB and a token, and of several `max_frame`, arrive whole, beside small ones.

        If this fails: `max_frame` is wrong, or what is cut into several frames loses one.
        """
        world = self.world()
        room = world.link()
        most = room._port.max_frame or MIB
        room.close()
        for size in (MIB + 4, min(3 * most + 4, MOST_BYTES)):
            count = size // 4
            prompt = TokenIds.of([number % 30_000 for number in range(count)])
            small = [world.owner.generate_async([number + 1], SamplingParams(max_tokens=9)) for number in range(8)]
            large = world.owner.generate_async(prompt, SamplingParams(max_tokens=9))
            for result in (*small, large):
                check(result, 9)

    @case("I5")
    def test_a_message_over_the_limit_is_refused_alone(self) -> None:
        """A prompt over `max_message_bytes` raises FrameTooLarge before anything is sent; others are unharmed.

        If this fails: the lane is broken by one message.
        """
        world = self.world()
        other = world.owner.generate_async([5, 6], SamplingParams(max_tokens=300))
        limit = world.settings.wire.max_message_bytes
        with pytest.raises((FrameTooLarge, RequestError)):
            world.owner.generate_async(TokenIds(bytes(limit + 4)), SamplingParams(max_tokens=1))
        check(other, 300)
        check_free(world)

    @case("I5")
    def test_a_request_error_ends_that_request_alone(self) -> None:
        """A request that fails in the engine raises RequestError; its neighbours and the engine go on.

        If this fails: an error is reported to another request, or taken for the engine's death.
        """
        world = self.start({"faults": FAULTS})
        params = SamplingParams(max_tokens=200)
        results = [world.owner.generate_async([number + 1, 9], params) for number in range(16)]
        failing = [world.owner.generate_async([POISON, number + 1], params) for number in range(4)]
        for result in failing:
            with pytest.raises(RequestError, match="poison"):
                result.result(PATIENCE_S)
            tokens = result.outputs[0].token_ids
            check_tokens(tokens, result.prompt_token_ids)
        for result in results:
            check(result, 200)
        check_free(world)

    @case("I10", needs=Capability.MANY_FRONTENDS, timeout_s=60.0)
    def test_a_frontend_that_does_not_read_ends_alone(self) -> None:
        """A frontend that reads nothing is expelled once its lane has been full for `stall_after_s`; others keep their streams.

        If this fails: something waits for a slow reader, or keeps all that it does not read.
        """
        world = self.world()
        gone = world.owner.stats().extra["worker"].get("expelled", 0)
        with slow_reader(world, LONG):
            params = SamplingParams(max_tokens=300)
            results = [world.owner.generate_async([number + 1, 2], params) for number in range(16)]
            for result in results:
                check(result, 300)
            until(lambda: world.owner.stats().extra["worker"].get("expelled", 0) > gone, "it is expelled")
        check_free(world)

    @case("I2", "I10")
    def test_a_consumer_that_pauses_gets_all_that_came_meanwhile(self) -> None:
        """A stream that nobody iterates over for a while loses nothing, and keeps no other one back.

        If this fails: what waits for a consumer is dropped, or waits in the way of others.
        """
        world = self.world()
        lazy = world.owner.generate_async([8, 8], SamplingParams(max_tokens=500))
        next(lazy)
        ask(world.owner, [1, 2], 300)
        tokens = list(lazy.outputs[0].token_ids)
        for update in lazy:
            tokens += update.outputs[0].token_ids_diff
        check_same(tokens, expected([8, 8], 500))

    @case("I4", "I5")
    def test_a_crash_in_a_step_ends_all_with_its_words(self) -> None:
        """What the engine raises in a step reaches every pending request, result and call as EngineDeadError with its words.

        If this fails: the engine's last frames are lost at its end.
        """
        world = self.start({"faults": FAULTS})
        frontends = [world.owner, *([world.attach()] if self.claims(Capability.MANY_FRONTENDS) else [])]
        results = [
            frontend.generate_async([number + 1], SamplingParams(max_tokens=LONG))
            for frontend in frontends
            for number in range(5)
        ]
        for result in results:
            next(result)
        bomb = world.owner.generate_async([BOMB], SamplingParams(max_tokens=LONG))
        for result in (*results, bomb):
            with pytest.raises(EngineDeadError, match="bomb"):
                result.result(PATIENCE_S)
            tokens = result.outputs[0].token_ids
            check_tokens(tokens, result.prompt_token_ids)
        with pytest.raises(EngineDeadError, match="bomb"):
            world.owner.generate_async([1], SamplingParams(max_tokens=1))
