"""GenerationResult against a ledger, with real threads and real event loops."""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable

import pytest

from tllm_core.contracts.messages import FINISH_CODES, GenerationRequest, SamplingParams, StepBatch, TokenIds
from tllm_core.errors import EngineDeadError, ResultBusyError
from tllm_core.ledger.ledger import Ledger, take
from tllm_core.ledger.result import GenerationResult
from tllm_core.ledger.waiting import wake_all

STOP = FINISH_CODES["stop"]


class Bench:
    """A ledger and the little of an executor that results need."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.next_id = 1

    def new(self, n: int = 1) -> GenerationResult:
        request = GenerationRequest(prompt_token_ids=TokenIds.of([1]), sampling=SamplingParams(n=n))
        box = self.ledger.register(self.next_id, n)
        self.next_id += 1
        return GenerationResult(request, box, self)

    def abort(self, client_id: int) -> None:
        effects = self.ledger.settle(client_id)
        if effects is not None:
            wake_all(effects.woken)

    def drop(self, client_id: int) -> None:
        self.ledger.dropped.append(client_id)

    def give(self, result: GenerationResult, *token_ids: int, finish: bool = False) -> None:
        finishes = [(0, STOP, None)] if finish else []
        batch = StepBatch([result.client_id], list(token_ids), counts=[len(token_ids)], finishes=finishes)
        wake_all(self.ledger.deliver(batch).woken)

    def die(self, message: str) -> None:
        wake_all(self.ledger.sweep(EngineDeadError(message)).woken)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(5_000):
        if condition():
            return
        tick.wait(0.002)
    raise AssertionError("the condition did not come true")


def test_iterating_yields_the_same_object_with_diffs(bench: Bench) -> None:
    result = bench.new()
    bench.give(result, 1, 2)
    assert next(result) is result
    assert result.outputs[0].token_ids_diff == [1, 2]
    bench.give(result, 3)
    bench.give(result, 4, finish=True)
    next(result)
    assert result.outputs[0].token_ids_diff == [3, 4]
    assert result.outputs[0].token_ids == [1, 2, 3, 4]
    assert result.finished
    with pytest.raises(StopIteration):
        next(result)
    with pytest.raises(StopIteration):
        next(result)


def test_a_blocked_sync_consumer_is_woken_by_each_delivery(bench: Bench) -> None:
    result = bench.new()
    seen: list[list[int]] = []

    def consume() -> None:
        seen.extend(r.outputs[0].token_ids_diff for r in result)

    thread = in_thread(consume)
    until(lambda: bool(result.mailbox.waiters))
    bench.give(result, 1)
    until(lambda: len(seen) == 1)
    bench.give(result, 2, finish=True)
    thread.join(10)
    assert [token for diff in seen for token in diff] == [1, 2]


def test_async_consumers_on_two_loops_are_served_at_once(bench: Bench) -> None:
    results = [bench.new() for _ in range(4)]
    got: dict[int, list[int]] = {}

    async def consume(result: GenerationResult) -> None:
        tokens: list[int] = []
        async for r in result:
            tokens += r.outputs[0].token_ids_diff
        got[result.client_id] = tokens

    async def both(pair: list[GenerationResult]) -> None:
        await asyncio.gather(*map(consume, pair))

    threads = [in_thread(lambda pair=pair: asyncio.run(both(pair))) for pair in (results[:2], results[2:])]  # type: ignore[misc]
    until(lambda: all(result.mailbox.waiters for result in results))
    batch = StepBatch([r.client_id for r in results], [10, 11, 12, 13])
    wake_all(bench.ledger.deliver(batch).woken)
    for result in results:
        bench.give(result, 5, finish=True)
    for thread in threads:
        thread.join(10)
    assert got == {r.client_id: [10 + i, 5] for i, r in enumerate(results)}


def test_many_waiters_share_one_end_beside_an_iterating_consumer(bench: Bench) -> None:
    result = bench.new()
    ended: list[list[int]] = []

    def wait_sync() -> None:
        ended.append(list(result.result(10).outputs[0].token_ids))

    async def wait_async() -> None:
        done = await asyncio.gather(result, result.aresult())
        ended.extend(list(r.outputs[0].token_ids) for r in done)

    threads = [in_thread(wait_sync), in_thread(wait_sync), in_thread(lambda: asyncio.run(wait_async()))]
    until(lambda: len(result.mailbox.final_waiters) == 4)
    bench.give(result, 1)
    assert next(result).outputs[0].token_ids_diff == [1]
    bench.give(result, 2, finish=True)
    for thread in threads:
        thread.join(10)
    assert ended == [[1, 2]] * 4
    assert next(result).outputs[0].token_ids_diff == [2]


def test_result_timeout_is_one_budget_and_leaves_the_request_alive(bench: Bench) -> None:
    result = bench.new()
    with pytest.raises(TimeoutError, match="goes on"):
        result.result(timeout=0.01)
    assert not result.mailbox.final_waiters
    bench.give(result, 1, finish=True)
    assert result.result(timeout=0).outputs[0].token_ids == [1]


def test_arrived_tokens_come_before_the_error_and_the_error_comes_again(bench: Bench) -> None:
    result = bench.new()
    bench.give(result, 1, 2)
    bench.die("rank 0 was killed by SIGKILL")
    assert next(result).outputs[0].token_ids_diff == [1, 2]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            next(result)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            result.result()
    assert result.finished


def test_a_death_wakes_sync_and_async_waiters(bench: Bench) -> None:
    results = [bench.new() for _ in range(3)]
    errors: list[str] = []

    def sync_result() -> None:
        with pytest.raises(EngineDeadError) as caught:
            results[0].result()
        errors.append(str(caught.value))

    async def async_iteration() -> None:
        with pytest.raises(EngineDeadError) as caught:
            async for _ in results[1]:
                pass
        errors.append(str(caught.value))

    def sync_iteration() -> None:
        with pytest.raises(EngineDeadError) as caught:
            next(results[2])
        errors.append(str(caught.value))

    threads = [in_thread(sync_result), in_thread(lambda: asyncio.run(async_iteration())), in_thread(sync_iteration)]
    until(lambda: bool(results[0].mailbox.final_waiters) and all(r.mailbox.waiters for r in results[1:]))
    bench.die("gone")
    for thread in threads:
        thread.join(10)
    assert errors == ["gone"] * 3


def test_a_second_iterating_consumer_is_told(bench: Bench) -> None:
    result = bench.new()
    thread = in_thread(lambda: [None for _ in result] and None)
    until(lambda: bool(result.mailbox.waiters))
    with pytest.raises(ResultBusyError, match="await"):
        next(result)
    bench.give(result, 1, finish=True)
    thread.join(10)


def test_a_cancelled_consumer_can_be_followed_by_another(bench: Bench) -> None:
    result = bench.new()

    async def scenario() -> list[int]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(result)
        bench.give(result, 7)
        await anext(result)
        return result.outputs[0].token_ids_diff

    assert asyncio.run(scenario()) == [7]


def test_a_waiter_left_while_others_are_taken_is_not_lost(bench: Bench) -> None:
    """The consumer runs between any two steps of the ledger: here, while a stale waiter is being taken."""
    result = bench.new()
    box = result.mailbox
    box.waiters.append("stale")

    class Interleaved(list[object]):
        def append(self, waiter: object) -> None:
            super().append(waiter)
            if waiter == "stale":
                box.rows.clear()
                box.waiters.append("new")

    woken = Interleaved()
    take(box.waiters, woken)
    assert woken + box.waiters == ["stale", "new"]


def test_polling_a_silent_request_leaves_nothing_behind(bench: Bench) -> None:
    result = bench.new()

    async def poll() -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await anext(result)

    asyncio.run(poll())
    assert result.mailbox.waiters == []


def test_a_closed_loop_does_not_disturb_the_others(bench: Bench) -> None:
    orphan, alive = bench.new(), bench.new()
    loop = asyncio.new_event_loop()
    orphan.mailbox.waiters.append(loop.create_future())
    loop.close()
    thread = in_thread(lambda: [None for _ in alive] and None)
    until(lambda: bool(alive.mailbox.waiters))
    batch = StepBatch([orphan.client_id, alive.client_id], [1, 2], finishes=[(1, STOP, None)])
    assert wake_all(bench.ledger.deliver(batch).woken) == 1
    thread.join(10)
    assert alive.finished


def test_abort_settles_at_once_and_ends_the_stream_with_its_reason(bench: Bench) -> None:
    result = bench.new(n=2)
    batch = StepBatch([result.client_id], [4])
    bench.ledger.deliver(batch)
    result.abort()
    result.abort()
    assert result.aborted()
    assert [r.outputs[0].token_ids_diff for r in result] == [[4]]
    assert [output.finish_reason for output in result.outputs] == ["abort", "abort"]
    assert result.result(0) is result


def test_leaving_the_with_block_aborts(bench: Bench) -> None:
    with bench.new() as result:
        pass
    assert result.aborted()


def test_losing_the_last_reference_leaves_the_id_to_be_aborted(bench: Bench) -> None:
    result = bench.new()
    client_id = result.client_id
    del result
    gc.collect()
    assert bench.ledger.take_dropped() == [client_id]
    finished = bench.new()
    bench.give(finished, 1, finish=True)
    del finished
    gc.collect()
    assert bench.ledger.take_dropped() == []


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
def test_a_result_is_neither_copied_nor_pickled_and_lives_on(bench: Bench, way: Callable[[object], object]) -> None:
    result = bench.new()
    with pytest.raises(TypeError, match="belongs to its executor"):
        way(result)
    gc.collect()
    assert bench.ledger.take_dropped() == []
    bench.give(result, 1, finish=True)
    assert copy.deepcopy(result.result(0).outputs)[0].token_ids == [1]
