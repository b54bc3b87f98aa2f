"""Who stops iterating has not ended the request: that is done by `abort`, by leaving `with`, or by losing the result."""

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest

from tllm_core import GenerationExecutor, GenerationResult, SamplingParams
from tllm_core.engines.echo import expected_tokens

MANY = SamplingParams(max_tokens=40)
LONG = SamplingParams(max_tokens=4000)


@pytest.fixture(scope="module")
def executor() -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(
        engine="echo", engine_options={"step_interval_s": 0.01}, transport="inproc"
    ) as executor:
        yield executor


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is awaited happens in another thread
            await asyncio.sleep(0.01)


async def first(result: GenerationResult) -> None:
    async for _ in result:
        break


def test_after_a_break_the_request_runs_on_and_its_result_can_be_read(executor: GenerationExecutor) -> None:
    async def use() -> None:
        result = executor.generate_async([1], MANY)
        await first(result)
        assert not result.aborted()
        seen = len(result.outputs[0].token_ids)
        await first(result)
        assert len(result.outputs[0].token_ids) > seen, "iterating goes on where it stopped"
        assert (await result).outputs[0].token_ids == expected_tokens([1], 40)

    asyncio.run(use())


def test_a_break_inside_with_aborts(executor: GenerationExecutor) -> None:
    async def use() -> None:
        with executor.generate_async([1], LONG) as result:
            await first(result)
        assert result.aborted()
        assert result.outputs[0].finish_reason == "abort"

    asyncio.run(use())
    assert executor.stats().running == 0


def test_a_cancelled_reader_that_holds_the_only_reference_aborts(executor: GenerationExecutor) -> None:
    async def read() -> None:
        async for _ in executor.generate_async([1], LONG):
            pass

    async def use() -> None:
        task = asyncio.create_task(read())
        await until(lambda: executor.stats().running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await until(lambda: executor.stats().running == 0)

    asyncio.run(use())


def test_a_cancelled_reader_leaves_a_request_that_others_hold(executor: GenerationExecutor) -> None:
    async def read(result: GenerationResult) -> None:
        async for _ in result:
            pass

    async def use() -> None:
        result = executor.generate_async([1], MANY)
        task = asyncio.create_task(read(result))
        await until(lambda: len(result.outputs[0].token_ids) > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rest = [token async for update in result for token in update.outputs[0].token_ids_diff]
        assert rest
        assert result.outputs[0].token_ids == expected_tokens([1], 40)

    asyncio.run(use())


def test_a_cancelled_wait_ends_nobody_elses(executor: GenerationExecutor) -> None:
    async def use() -> None:
        result = executor.generate_async([1], MANY)
        waits = [asyncio.create_task(result.aresult()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await result
        for wait in waits[1:]:
            assert (await wait).outputs[0].token_ids == expected_tokens([1], 40)
        assert not result.aborted()
        assert not result.mailbox.final_waiters

    asyncio.run(use())
