"""Loops and threads: an executor belongs to none of them."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, PAIRS, SLOW, Trace, Worlds, _worlds, until
from tllm_core import GenerationExecutor, GenerationResult, Overloaded, SamplingParams
from tllm_core.engines.echo import expected_tokens

THREADS = 32
STORM_S = 3.0
FEW = SamplingParams(max_tokens=5)


@pytest.fixture(params=["inproc-inline", "zmq-ipc"])
def worlds(request: pytest.FixtureRequest, trace: Trace) -> Iterator[Worlds]:
    assert request.param in PAIRS
    yield from _worlds(request.param, trace)


async def tokens_of(result: GenerationResult) -> list[int]:
    tokens = []
    async for update in result:
        tokens += update.outputs[0].token_ids_diff
    return tokens


def check_empty(executor: GenerationExecutor) -> None:
    until(lambda: executor.health().in_flight == 0, "no request is open")
    until(lambda: executor.stats().running == 0, "the engine runs nothing")
    assert len(executor._frontend.ledger) == 0


def test_made_in_one_loop_and_used_in_others(worlds: Worlds) -> None:
    async def make() -> GenerationExecutor:
        executor = await asyncio.to_thread(worlds)
        assert (await executor.generate_async([1], FEW)).outputs[0].token_ids == expected_tokens([1], 5)
        return executor

    executor = asyncio.run(make())
    for i in (2, 3):
        assert asyncio.run(tokens_of(executor.generate_async([i], FEW))) == expected_tokens([i], 5)


def test_made_and_ended_inside_a_running_loop(worlds: Worlds) -> None:
    async def whole() -> list[int]:
        with worlds() as executor:
            return await tokens_of(executor.generate_async([1], FEW))

    assert asyncio.run(whole()) == expected_tokens([1], 5)


def test_a_result_begun_in_one_loop_is_finished_in_another(worlds: Worlds) -> None:
    executor = worlds(**SLOW)
    result = executor.generate_async([4], SamplingParams(max_tokens=20))

    async def begin() -> list[int]:
        return (await anext(result)).outputs[0].token_ids_diff

    first = asyncio.run(begin())
    rest = asyncio.run(tokens_of(result))
    assert first + rest == expected_tokens([4], 20)
    assert result.result(0) is result


def test_sync_use_inside_a_running_loop(worlds: Worlds) -> None:
    executor = worlds()

    async def both() -> None:
        beside = asyncio.create_task(tokens_of(executor.generate_async([7], FEW)))
        await asyncio.sleep(0)
        sync = executor.generate([8], FEW)
        assert sync.outputs[0].token_ids == expected_tokens([8], 5)  # type: ignore[union-attr]
        assert [u.outputs[0].length for u in executor.generate_async([9], FEW)][-1] == 5
        assert executor.stats().running <= 1
        assert await beside == expected_tokens([7], 5)

    asyncio.run(both())


def test_a_loop_that_closes_with_requests_pending_stops_nobody_else(worlds: Worlds) -> None:
    executor = worlds(**SLOW)
    loop = asyncio.new_event_loop()
    results = [executor.generate_async([i], SamplingParams(max_tokens=20)) for i in range(1, 9)]

    async def wait(result: GenerationResult) -> None:
        await anext(result)
        await result

    tasks = [loop.create_task(wait(result)) for result in results]
    loop.run_until_complete(asyncio.sleep(0.1))
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    other = executor.generate_async([50], SamplingParams(max_tokens=20))
    assert asyncio.run(tokens_of(other)) == expected_tokens([50], 20)
    for i, result in enumerate(results, 1):
        assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([i], 20)
    assert executor.check_health()
    del tasks
    gc.collect()
    check_empty(executor)


def storm(executor: GenerationExecutor, seed: int, wrong: list[str]) -> None:
    """Submits, reads, aborts, drops and waits at random; what comes back must be right."""
    dice, end = random.Random(seed), time.monotonic() + STORM_S
    while time.monotonic() < end:
        prompt, count = [seed, dice.randrange(1000)], dice.randint(1, 8)
        try:
            result = executor.generate_async(prompt, SamplingParams(max_tokens=count))
        except Overloaded:
            executor.wait_for_room()
            continue
        match dice.randrange(5):
            case 0:
                tokens = asyncio.run(tokens_of(result))
            case 1:
                tokens = [token for update in result for token in update.outputs[0].token_ids_diff]
            case 2:
                tokens = result.result(DEADLINE_S).outputs[0].token_ids
            case 3:
                next(result)
                result.abort()
                tokens = result.result(DEADLINE_S).outputs[0].token_ids
            case _:
                del result
                continue
        whole = result.outputs[0].finish_reason == "length"
        if tokens != expected_tokens(prompt, count if whole else len(tokens)):
            wrong.append(f"{prompt}: {tokens}")


def test_32_threads_that_submit_and_abort_leave_nothing(worlds: Worlds) -> None:
    executor, wrong = worlds(), []
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            storm(executor, seed, wrong)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert (errors, wrong) == ([], [])
    check_empty(executor)
    until(executor._frontend.link.idle, "everything is acknowledged")
    assert not executor._frontend.ledger.dropped


class Knot:
    """Garbage that only the collector finds, with a result in it."""

    def __init__(self, result: GenerationResult) -> None:
        self.result, self.itself = result, self


def test_results_that_are_collected_inside_any_lock_never_deadlock(worlds: Worlds) -> None:
    """With a threshold of a few objects the collector runs in the middle of everything, with whatever locks are held."""
    executor = worlds()
    before = gc.get_threshold()
    gc.set_threshold(7, 2, 2)
    try:

        def knot(seed: int) -> None:
            for i in range(150):
                Knot(executor.generate_async([seed, i], LONG))

        threads = [threading.Thread(target=knot, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a finalizer waits for a lock that its own thread holds"
    finally:
        gc.set_threshold(*before)
    gc.collect()
    check_empty(executor)
    assert executor.generate([1], FEW)


def test_a_collection_by_the_holder_of_the_ledgers_lock_does_not_wait(worlds: Worlds) -> None:
    executor = worlds(**SLOW)
    Knot(executor.generate_async([1], LONG))
    done = threading.Event()

    def collect() -> None:
        with executor._frontend.ledger._lock, executor._frontend.link._lock:
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(DEADLINE_S)
    check_empty(executor)


def test_an_executor_that_is_collected_inside_its_own_locks_ends_its_world(worlds: Worlds) -> None:
    executor = worlds()
    worlds.started.clear()
    frontend = executor._frontend
    knot = [executor]
    knot.append(knot)  # type: ignore[arg-type]
    del executor, knot
    with frontend.ledger._lock, frontend.link._lock, frontend._close_lock:
        gc.collect()
    until(frontend._closed.is_set, "the world was ended")
