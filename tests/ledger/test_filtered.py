"""Result filters: what they see, what they may call, and what their consumers get."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.ledger.test_result import STOP, Bench, in_thread, until
from tllm_core.contracts.messages import GenerationRequest, SamplingParams, StepBatch, TokenIds
from tllm_core.errors import EngineDeadError
from tllm_core.ledger.filtered import FilteredResult, ResultFilter
from tllm_core.ledger.result import GenerationResult

pytestmark = pytest.mark.timeout(60)


class Filtered(Bench):
    """A bench whose results have filters."""

    def with_filters(self, *filters: ResultFilter) -> FilteredResult:
        request = GenerationRequest(prompt_token_ids=TokenIds.of([1]), sampling=SamplingParams())
        box = self.ledger.register(self.next_id)
        self.next_id += 1
        return FilteredResult(request, box, self, filters)


@pytest.fixture
def bench() -> Filtered:
    return Filtered()


class Seen:
    """A filter that remembers what it was given, and then does something."""

    def __init__(self, then: Callable[[GenerationResult], object] = lambda result: None) -> None:
        self.updates: list[tuple[list[int], str | None]] = []
        self.then = then

    def __call__(self, result: GenerationResult) -> None:
        output = result.outputs[0]
        self.updates.append((list(output.token_ids), output.finish_reason))
        self.then(result)


def abort_at(length: int) -> Callable[[GenerationResult], None]:
    def check(result: GenerationResult) -> None:
        if result.outputs[0].length >= length:
            result.abort()

    return check


def poll(result: GenerationResult) -> None:
    until(lambda: result.finished)


async def exhaust_async(result: GenerationResult) -> None:
    async for _ in result:
        pass


async def await_it(result: GenerationResult) -> None:
    await result


READ: dict[str, Callable[[GenerationResult], Any]] = {
    "iterate": lambda result: [None for _ in result],
    "aiterate": lambda result: asyncio.run(exhaust_async(result)),
    "poll": poll,
}
WAIT: dict[str, Callable[[GenerationResult], Any]] = {
    "result": lambda result: result.result(30),
    "await": lambda result: asyncio.run(await_it(result)),
}


@pytest.mark.parametrize("way", READ)
def test_a_filter_that_aborts_ends_the_request_for_whoever_reads(bench: Filtered, way: str) -> None:
    first, last = Seen(abort_at(3)), Seen()
    result = bench.with_filters(first, last)
    bench.give(result, 1, 2, 3)
    READ[way](result)
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([1, 2, 3], "abort")
    assert result.aborted()
    assert first.updates == [([1, 2, 3], None), ([1, 2, 3], "abort")]
    assert last.updates == [([1, 2, 3], "abort")], "who comes after the one that aborted is given the end at once"


@pytest.mark.parametrize("way", WAIT)
@pytest.mark.parametrize("last", ["finish", "death"])
def test_a_filter_may_abort_what_has_ended(bench: Filtered, way: str, last: str) -> None:
    seen = Seen(lambda result: result.abort())
    result = bench.with_filters(seen)
    if last == "finish":
        bench.give(result, 1, finish=True)
        WAIT[way](result)
        assert seen.updates == [([1], "stop")]
    else:
        bench.give(result, 1)
        bench.die("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            WAIT[way](result)
        assert seen.updates == [([1], None)]


def test_tokens_up_to_the_abort_come_with_its_reason_as_one_update(bench: Filtered) -> None:
    result = bench.with_filters(Seen(abort_at(3)))
    bench.give(result, 1)
    assert next(result).outputs[0].token_ids_diff == [1]
    bench.give(result, 2, 3)
    output = next(result).outputs[0]
    assert (output.token_ids_diff, output.finish_reason) == ([2, 3], "abort")
    with pytest.raises(StopIteration):
        next(result)


def test_a_filter_may_read_all_of_the_result(bench: Filtered) -> None:
    facts: list[object] = []

    def look(result: GenerationResult) -> None:
        facts.append((result.finished, result.aborted()))
        try:
            facts.append(result.result(0).outputs[0].finish_reason)
        except TimeoutError:
            facts.append(TimeoutError)

    result = bench.with_filters(look)
    bench.give(result, 1)
    next(result)
    bench.give(result, 2, finish=True)
    assert next(result).finished
    assert facts == [(False, False), TimeoutError, (True, False), "stop"]


def test_after_its_abort_a_filter_sees_the_end(bench: Filtered) -> None:
    facts: list[object] = []

    def abort(result: GenerationResult) -> None:
        result.abort()
        facts.append((result.aborted(), result.finished, result.result(0).outputs[0].finish_reason))

    result = bench.with_filters(abort)
    bench.give(result, 1)
    next(result)
    assert facts == [(True, True, "abort")] * 2


def test_a_filter_may_wait_for_the_end(bench: Filtered) -> None:
    seen = Seen(lambda result: result.result(30))
    result = bench.with_filters(seen)
    bench.give(result, 1)
    thread = in_thread(lambda: [None for _ in result] and None)
    until(lambda: bool(result.mailbox.final_waiters))
    bench.give(result, 2, finish=True)
    thread.join(10)
    assert seen.updates == [([1], None), ([1, 2], "stop")]


def test_a_filter_that_reads_while_tokens_arrive_neither_skips_an_update_nor_holds_one_back(bench: Filtered) -> None:
    """It is slower than the engine: each time that it reads, there is more."""
    shown: list[list[int]] = []

    def slow(result: GenerationResult) -> None:
        bench.give(result, len(shown) + 7)
        assert not result.finished
        shown.append(list(result.outputs[0].token_ids))

    result = bench.with_filters(slow)
    bench.give(result, 1)
    for expected in ([1], [1, 7], [1, 7, 8]):
        assert not result.finished
        assert result.outputs[0].token_ids == shown[-1] == expected


def test_filters_see_each_update_once_and_in_order_whoever_reads(bench: Filtered) -> None:
    inside = threading.Semaphore()
    clashes: list[int] = []

    def alone(result: GenerationResult) -> None:
        if not inside.acquire(blocking=False):
            clashes.append(result.outputs[0].length)
            return
        result.finished  # noqa: B018 - reading is the point
        inside.release()

    filters = [Seen(alone), Seen()]
    result = bench.with_filters(*filters)
    readers = [
        in_thread(lambda way=way: {**READ, **WAIT}[way](result)) for way in ("iterate", "poll", "result", "await")
    ]  # type: ignore[misc]
    for token_id in range(1, 200):
        bench.give(result, token_id)
        until(lambda: not result.mailbox.rows)
    bench.give(result, 200, finish=True)
    for reader in readers:
        reader.join(30)
    assert not any(reader.is_alive() for reader in readers)
    for seen in filters:
        lengths = [len(token_ids) for token_ids, _ in seen.updates]
        assert lengths == sorted(set(lengths))
        assert seen.updates[-1] == (list(range(1, 201)), "stop")
    assert filters[0].updates == filters[1].updates
    assert not clashes


@pytest.mark.parametrize("holder", ["result", "iterate"])
@pytest.mark.parametrize("other", ["poll", "result", "await"])
def test_no_consumer_gets_the_end_before_the_filters_have_seen_it(bench: Filtered, holder: str, other: str) -> None:
    ways = {**READ, **WAIT}
    entered, leave, got = threading.Event(), threading.Event(), threading.Event()

    def hold(result: GenerationResult) -> None:
        entered.set()
        leave.wait(30)

    result = bench.with_filters(hold)
    bench.give(result, 1, finish=True)
    first = in_thread(lambda: ways[holder](result) and None)
    assert entered.wait(30)

    def get() -> None:
        ways[other](result)
        got.set()

    second = in_thread(get)
    assert not got.wait(0.1)
    leave.set()
    first.join(30)
    second.join(30)
    assert got.is_set()


def test_a_filter_may_wait_for_another_thread_that_aborts(bench: Filtered) -> None:
    with ThreadPoolExecutor(1) as pool:
        seen = Seen(lambda result: pool.submit(result.abort).result(10))
        result = bench.with_filters(seen)
        bench.give(result, 1)
        assert [r.outputs[0].finish_reason for r in result] == ["abort"]
    assert seen.updates == [([1], None), ([1], "abort")]


def test_an_abort_from_outside_shows_filters_the_end(bench: Filtered) -> None:
    seen = Seen()
    result = bench.with_filters(seen)
    bench.give(result, 1)
    result.abort()
    assert result.outputs[0].finish_reason == "abort"
    assert seen.updates == [([1], "abort")]


def test_a_filter_that_aborts_and_raises_is_detached_and_the_stream_ends(
    bench: Filtered, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(result: GenerationResult) -> None:
        result.abort()
        raise ValueError("own fault")

    bad, good = Seen(fail), Seen()
    result = bench.with_filters(bad, good)
    bench.give(result, 1)
    with caplog.at_level(logging.ERROR, "tllm_core"):
        assert [r.outputs[0].finish_reason for r in result] == ["abort"]
    assert "detached from request 1" in caplog.text
    assert (len(bad.updates), good.updates) == (1, [([1], "abort")])


def test_a_filter_that_iterates_is_told_and_detached(bench: Filtered, caplog: pytest.LogCaptureFixture) -> None:
    result = bench.with_filters(lambda result: [None for _ in result] and None)
    bench.give(result, 1, finish=True)
    with caplog.at_level(logging.ERROR, "tllm_core"):
        assert result.result(0).outputs[0].token_ids == [1]
    assert "a result filter iterates over request 1" in caplog.text


def test_what_interrupts_a_filter_reaches_the_consumer_and_the_next_read_goes_on(bench: Filtered) -> None:
    interrupts = [KeyboardInterrupt()]

    def interrupted(result: GenerationResult) -> None:
        if interrupts:
            raise interrupts.pop()

    later = Seen()
    result = bench.with_filters(interrupted, later)
    bench.ledger.deliver(StepBatch([result.client_id], [1], finishes=[(0, STOP, None)]))
    with pytest.raises(KeyboardInterrupt):
        next(result)
    assert not later.updates
    assert [r.outputs[0].token_ids_diff for r in result] == [[1]]
    assert later.updates == [([1], "stop")]
    assert result.finished
