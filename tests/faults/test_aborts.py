"""Aborts in every phase: exactly one terminal outcome, and the engine is free again."""

import asyncio
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds, until
from tllm_core import GenerationExecutor, GenerationResult, SamplingParams
from tllm_core.engines.echo import expected_tokens

RACES = 200


def check_free(executor: GenerationExecutor) -> None:
    """Nothing is open here, and nothing runs, waits or is remembered there."""
    until(lambda: executor.health().in_flight == 0, "no request is open")

    def idle() -> bool:
        stats: Any = executor.stats()
        return (stats.running, stats.waiting, stats.extra["worker"]["requests"]) == (0, 0, 0)

    until(idle, "the engine runs nothing and nothing waits in it")


def check_one_outcome(result: GenerationResult, reason: str) -> None:
    """It ended with this reason, once, in every sequence, and stays so."""
    updates = list(result)
    assert list(result) == []
    assert result.result(0) is result
    assert [output.finish_reason for output in result.outputs] == [reason] * len(result.outputs)
    assert result.aborted() == (reason == "abort")
    assert len(updates) <= 2
    prompt = result.prompt_token_ids
    for output in result.outputs:
        assert output.token_ids == expected_tokens(prompt, output.length, output.index)


@pytest.fixture
def slow(anywhere: Worlds) -> GenerationExecutor:
    return anywhere(max_batch_size=2, **SLOW)


def test_before_it_is_sent(anywhere: Worlds) -> None:
    """The engine is busy and the window full, so that most of these are still on this side."""
    executor = anywhere(settings={"wire.window_frames": 4})
    call = threading.Thread(target=executor.control, args=("sleep_for", 1.0))
    call.start()
    until(lambda: len(executor._frontend.ledger) == 1, "the engine was asked to sleep")
    results = [executor.generate_async([i], LONG) for i in range(1, 17)]
    for result in results:
        result.abort()
    for result in results:
        check_one_outcome(result, "abort")
        assert result.outputs[0].token_ids == []
    call.join(DEADLINE_S)
    check_free(executor)


def test_queued_in_the_engine(slow: GenerationExecutor) -> None:
    running = [slow.generate_async([i], SamplingParams(max_tokens=30)) for i in (1, 2)]
    queued = [slow.generate_async([i], LONG) for i in range(3, 9)]
    until(lambda: slow.stats().waiting == 6, "they wait")
    for result in queued:
        result.abort()
        check_one_outcome(result, "abort")
        assert result.outputs[0].token_ids == []
    for i, result in enumerate(running, 1):
        assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([i], 30)
    check_free(slow)


def test_in_mid_stream_sync_async_and_by_id(slow: GenerationExecutor) -> None:
    async def streamed() -> None:
        result = slow.generate_async([1, 2], LONG)
        seen = []
        async for update in result:
            seen.append(update.outputs[0].finish_reason)
            if len(seen) == 3:
                slow.abort(result.client_id)
        assert seen.count("abort") == 1
        assert seen[-1] == "abort"
        assert (await result) is result

    asyncio.run(streamed())
    result = slow.generate_async([3], LONG)
    next(result)
    result.abort()
    check_one_outcome(result, "abort")
    check_free(slow)


def test_a_waiting_consumer_of_each_kind_is_woken(slow: GenerationExecutor) -> None:
    results = [slow.generate_async([i], LONG) for i in (1, 2, 3)]
    reasons: list[str | None] = []

    def wait() -> None:
        reasons.append(results[0].result(DEADLINE_S).outputs[0].finish_reason)

    def iterate() -> None:
        for result in results[1]:
            last = result.outputs[0].finish_reason
        reasons.append(last)

    async def queued() -> None:
        reasons.append((await results[2]).outputs[0].finish_reason)

    threads = [threading.Thread(target=work) for work in (wait, iterate, lambda: asyncio.run(queued()))]
    for thread in threads:
        thread.start()
    until(lambda: slow.stats().running == 2, "two run")
    for result in results:
        slow.abort(result.client_id)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert reasons == ["abort"] * 3
    check_free(slow)


def test_in_the_tick_of_the_finish(anywhere: Worlds) -> None:
    """Whoever is first decides; a finish that won has all of its tokens."""
    executor, dice, ended = anywhere(), random.Random(7), Counter[str]()
    for i in range(RACES):
        count = dice.randint(1, 4)
        result = executor.generate_async([i, 1], SamplingParams(max_tokens=count))
        if dice.random() < 0.5:
            next(result)
        time.sleep(dice.random() * 0.001)
        result.abort()
        reason = result.result(DEADLINE_S).outputs[0].finish_reason
        assert reason in ("length", "abort")
        check_one_outcome(result, str(reason))
        assert result.outputs[0].length == count or reason == "abort"
        ended[str(reason)] += 1
    print(dict(ended))
    assert executor.generate([5], SamplingParams(max_tokens=2))
    check_free(executor)


def test_after_the_finish_twice_and_unknown_are_quiet(anywhere: Worlds) -> None:
    executor = anywhere()
    result = executor.generate_async([1], SamplingParams(max_tokens=3))
    result.result(DEADLINE_S)
    for client_id in (result.client_id, result.client_id, 0, 1 << 62, -1):
        executor.abort(client_id)
    check_one_outcome(result, "length")
    with result:
        pass
    assert result.outputs[0].finish_reason == "length"
    again = executor.generate_async([2], SamplingParams(max_tokens=3)).result(DEADLINE_S)
    assert again.outputs[0].token_ids == expected_tokens([2], 3)
    check_free(executor)


def test_of_n_sequences_ends_all_that_have_not_ended(anywhere: Worlds) -> None:
    executor = anywhere(max_batch_size=4, **SLOW)
    running = executor.generate_async([1, 2], SamplingParams(n=4, max_tokens=4000))
    queued = executor.generate_async([1, 2], SamplingParams(n=3, max_tokens=4000))
    next(running)
    for result in (running, queued):
        result.abort()
        check_one_outcome(result, "abort")
    check_free(executor)


def test_abort_all_ends_what_runs_and_what_waits_and_nothing_later(slow: GenerationExecutor) -> None:
    results = [slow.generate_async([i], LONG) for i in range(1, 17)]
    next(results[0])
    slow.abort_all()
    slow.abort_all()
    for result in results:
        check_one_outcome(result, "abort")
    later = slow.generate_async([9], SamplingParams(max_tokens=3)).result(DEADLINE_S)
    assert later.outputs[0].token_ids == expected_tokens([9], 3)
    check_free(slow)


@pytest.mark.parametrize("phase", ["queued", "decoding", "n sequences"])
def test_a_deadline_ends_a_request_in_any_phase(slow: GenerationExecutor, phase: str) -> None:
    filler = [slow.generate_async([i], LONG) for i in ((1, 2) if phase == "queued" else ())]
    n = 2 if phase == "n sequences" else 1
    result = slow.generate_async([7], SamplingParams(n=n, max_tokens=4000), timeout_s=0.5)
    result.result(DEADLINE_S)
    check_one_outcome(result, "timeout")
    assert all((output.length == 0) == (phase == "queued") for output in result.outputs)
    for other in filler:
        assert not other.finished
        other.abort()
    check_free(slow)


def test_an_abort_that_races_with_the_deadline_has_one_outcome(slow: GenerationExecutor) -> None:
    for _ in range(20):
        result = slow.generate_async([7], LONG, timeout_s=0.05)
        time.sleep(0.05)
        result.abort()
        check_one_outcome(result, str(result.result(DEADLINE_S).outputs[0].finish_reason))
    check_free(slow)


def test_each_way_to_leave_a_stream_frees_the_engine(slow: GenerationExecutor) -> None:
    """A loop that breaks, a cancelled task, an async generator that is dropped in the middle."""

    async def stream(prompt: list[int], steps: int) -> None:
        async for _ in slow.generate_async(prompt, LONG):
            steps -= 1
            if not steps:
                break

    async def generator() -> Any:
        async for update in slow.generate_async([3], LONG):
            yield update

    async def leave() -> None:
        await stream([1], 1)
        task = asyncio.create_task(stream([2], 4000))
        until(lambda: slow.stats().running > 0, "it runs")
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task  # its exception's traceback holds the stream
        updates = generator()
        await anext(updates)
        del updates

    asyncio.run(leave())
    check_free(slow)
