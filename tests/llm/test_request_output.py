"""RequestOutput over a real ledger, with real threads and real event loops: text exactly once, whoever waits."""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Sequence

import pytest

from tllm_core.contracts.messages import (
    FINISH_CODES,
    ErrorReport,
    GenerationRequest,
    Logprob,
    RowExtra,
    SamplingParams,
    StepBatch,
    TokenIds,
)
from tllm_core.errors import EngineDeadError, RequestError, ResultBusyError
from tllm_core.ledger.filtered import FilteredResult, ResultFilter
from tllm_core.ledger.ledger import Ledger
from tllm_core.ledger.result import GenerationResult
from tllm_core.ledger.waiting import wake_all
from tllm_core.llm import RequestOutput
from tllm_core.llm.crowd import Crowd
from tllm_core.text import SequenceText, StopStrings

TEXTS = ["", "AB", "ST", "OP", "C", "D", "boom"]
AB, ST, OP, C, D, BOOM = range(1, 7)


class Spelled:
    """A detokenizer over a table of texts, with one token that it can't take."""

    def push(self, token_id: int) -> str:
        if token_id == BOOM:
            raise ValueError("no such piece")
        return TEXTS[token_id]

    def flush(self) -> str:
        return ""


class Bench:
    """A ledger and the little of an executor that results need; counts the aborts."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.next_id = 1
        self.aborts: list[int] = []

    def new(self, *stops: str, n: int = 1, filters: Sequence[ResultFilter] = ()) -> RequestOutput:
        request = GenerationRequest(prompt_token_ids=TokenIds.of([1]), sampling=SamplingParams(n=n))
        box = self.ledger.register(self.next_id, n)
        self.next_id += 1
        compiled = StopStrings(stops) if stops else None
        sequences = [SequenceText(Spelled(), compiled) for _ in range(n)]
        result = FilteredResult(request, box, self, filters) if filters else GenerationResult(request, box, self)
        return RequestOutput(result, "p", sequences, has_stops=bool(stops))

    def abort(self, client_id: int) -> None:
        effects = self.ledger.settle(client_id)
        if effects is not None:
            self.aborts.append(client_id)
            wake_all(effects.woken)

    def drop(self, client_id: int) -> None:
        self.ledger.dropped.append(client_id)

    def give(self, output: RequestOutput, *token_ids: int, index: int = 0, finish: str | None = None) -> None:
        self.give_all([output], token_ids, index, finish)

    def give_all(
        self, outputs: Sequence[RequestOutput], token_ids: Sequence[int], index: int = 0, finish: str | None = None
    ) -> None:
        rows = range(len(outputs))
        batch = StepBatch(
            [output.client_id for output in outputs],
            [*token_ids] * len(outputs),
            counts=[len(token_ids) for _ in rows],
            indexes=[index for _ in rows],
            finishes=[(row, FINISH_CODES[finish], None) for row in rows] if finish else [],  # type: ignore[index]
        )
        wake_all(self.ledger.deliver(batch).woken)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def in_thread(work: Callable[[], object]) -> threading.Thread:
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


def waiting(output: RequestOutput) -> int:
    return (output._leader is not None) + len(output._followers) + len(output._box.final_waiters)


# ------------------------------------------------------------------------------------------------------ iterating


def test_iterating_yields_the_same_object_with_text_and_token_diffs(bench: Bench) -> None:
    output = bench.new()
    bench.give(output, AB)
    assert next(output) is output
    assert (output.outputs[0].text_diff, output.outputs[0].token_ids_diff) == ("AB", [AB])
    bench.give(output, C)
    bench.give(output, D, finish="length")
    next(output)
    one = output.outputs[0]
    assert (one.text_diff, one.token_ids_diff, one.text, one.token_ids) == ("CD", [C, D], "ABCD", [AB, C, D])
    assert (one.finish_reason, output.finished) == ("length", True)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(output)


def test_a_stop_string_ends_the_stream_and_the_engines_request_once(bench: Bench) -> None:
    output = bench.new("STOP")
    seen: list[tuple[str, list[int]]] = []

    def consume() -> None:
        seen.extend((update.outputs[0].text_diff, update.outputs[0].token_ids_diff) for update in output)

    thread = in_thread(consume)
    for token_ids in ([AB], [ST], [OP, C], [D]):
        until(lambda: output._leader is not None or output._finished)
        bench.give(output, *token_ids)
    thread.join(10)
    one = output.outputs[0]
    assert "".join(text for text, _ in seen) == "AB" == one.text
    assert [token for _, ids in seen for token in ids] == [AB] == one.token_ids
    assert (one.finish_reason, one.stop_reason) == ("stop", "STOP")
    assert bench.aborts == [output.client_id]
    assert (output.finished, output.aborted()) == (True, False)
    output.abort()
    assert bench.aborts == [output.client_id]


def test_text_held_back_gives_no_update(bench: Bench) -> None:
    output = bench.new("STOP")
    updates: list[str] = []
    thread = in_thread(lambda: updates.extend(update.outputs[0].text_diff for update in output))
    until(lambda: output._leader is not None)
    bench.give(output, ST)
    bench.give(output, ST)
    until(lambda: updates == ["ST"])
    bench.give(output, finish="stop")
    thread.join(10)
    assert updates == ["ST", "ST"]
    assert output.outputs[0].token_ids == [ST, ST]


def test_a_second_iterating_consumer_is_refused(bench: Bench) -> None:
    output = bench.new()
    thread = in_thread(lambda: list(output))
    until(lambda: output._leader is not None)
    with pytest.raises(ResultBusyError):
        next(output)
    bench.give(output, finish="stop")
    thread.join(10)


# ------------------------------------------------------------------------------------------------ several at once


def test_waiters_of_every_kind_beside_a_slow_consumer_see_a_stop_string_as_it_comes(bench: Bench) -> None:
    output = bench.new("STOP")
    bench.give(output, AB)
    next(output)  # and then this consumer reads no more
    ended: list[str] = []

    async def wait_async() -> None:
        done = await asyncio.gather(output, output.aresult())
        ended.extend(each.outputs[0].text for each in done)

    threads = [
        in_thread(lambda: ended.append(output.result(10).outputs[0].text)),
        in_thread(lambda: ended.append(output.result(10).outputs[0].text)),
        in_thread(lambda: asyncio.run(wait_async())),
    ]
    until(lambda: waiting(output) == 4)
    bench.give(output, ST)
    bench.give(output, OP)
    for thread in threads:
        thread.join(10)
    assert ended == ["AB"] * 4
    assert bench.aborts == [output.client_id]
    assert [update.outputs[0].finish_reason for update in output] == ["stop"]


@pytest.mark.parametrize("stops", [(), ("STOP",)])
def test_many_threads_and_loops_read_each_token_once(bench: Bench, stops: tuple[str, ...]) -> None:
    output = bench.new(*stops)
    texts: list[str] = []
    chunks: list[str] = []

    async def two() -> None:
        await asyncio.gather(output.aresult(), output.aresult())
        texts.append(output.outputs[0].text)

    threads = [in_thread(lambda: texts.append(output.result(20).outputs[0].text)) for _ in range(4)]
    threads += [in_thread(lambda: asyncio.run(two())) for _ in range(2)]
    threads.append(in_thread(lambda: chunks.extend(update.outputs[0].text_diff for update in output)))
    for _ in range(300):
        bench.give(output, C, D)
        bench.give(output, AB)
    bench.give(output, finish="length")
    for thread in threads:
        thread.join(20)
    assert texts == ["CDAB" * 300] * 6
    assert "".join(chunks) == "CDAB" * 300
    assert waiting(output) == 0


def test_a_cancelled_waiter_hands_the_reading_on(bench: Bench) -> None:
    async def main() -> None:
        output = bench.new("STOP")
        leader = asyncio.create_task(anext(output))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        follower = asyncio.create_task(output.aresult())
        await asyncio.sleep(0)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        bench.give(output, ST, OP)
        assert (await asyncio.wait_for(follower, 10)).outputs[0].stop_reason == "STOP"

    asyncio.run(main())


def test_a_timed_out_waiter_hands_the_reading_on_and_leaves_the_request_alive(bench: Bench) -> None:
    output = bench.new("STOP")
    with pytest.raises(TimeoutError, match="goes on"):
        output.result(0)
    follower = in_thread(lambda: output.result(20))
    until(lambda: output._leader is not None)
    with pytest.raises(TimeoutError):
        output.result(0.05)
    bench.give(output, AB, ST, OP)
    follower.join(10)
    assert output.result(0).outputs[0].text == "AB"


def test_result_alone_leaves_the_whole_text_as_the_diff(bench: Bench) -> None:
    output = bench.new()
    bench.give(output, AB, C, finish="stop")
    one = output.result(0).outputs[0]
    assert (one.text_diff, one.token_ids_diff) == ("ABC", [AB, C])


# ------------------------------------------------------------------------------------------------ several sequences


def test_the_engines_request_is_aborted_once_all_sequences_have_their_end(bench: Bench) -> None:
    output = bench.new("STOP", n=3)
    bench.give(output, AB, ST, OP, C, index=1)
    assert not output.finished
    bench.give(output, D, index=0, finish="length")
    assert not output.finished
    assert bench.aborts == []
    bench.give(output, OP, index=1)
    bench.give(output, ST, OP, index=2)
    output.result(10)
    assert bench.aborts == [output.client_id]
    assert [one.text for one in output.outputs] == ["D", "AB", ""]
    assert [one.finish_reason for one in output.outputs] == ["length", "stop", "stop"]
    assert [one.stop_reason for one in output.outputs] == [None, "STOP", "STOP"]


def test_an_abort_ends_the_sequences_that_had_no_end(bench: Bench) -> None:
    output = bench.new("STOP", n=2)
    bench.give(output, AB, ST, OP, index=1)
    bench.give(output, AB, ST, index=0)
    output.abort()
    output.result(10)
    assert output.aborted()
    assert [(one.text, one.finish_reason) for one in output.outputs] == [("ABST", "abort"), ("AB", "stop")]
    assert output.outputs[0].token_ids == [AB, ST]


# ---------------------------------------------------------------------------------------------------------- errors


def test_an_error_comes_after_what_had_arrived_and_each_time(bench: Bench) -> None:
    output = bench.new("STOP")
    bench.give(output, AB, ST)
    wake_all(bench.ledger.sweep(EngineDeadError("gone")).woken)
    assert next(output).outputs[0].text == "ABST"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            next(output)
        with pytest.raises(EngineDeadError, match="gone"):
            output.result(0)


def test_tokens_that_make_no_text_end_that_request_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = bench.new(), bench.new()
    bench.give_all([bad, good], [AB])
    bench.give(bad, BOOM)
    with pytest.raises(RequestError, match="no such piece") as caught:
        bad.result(10)
    assert caught.value.client_id == bad.client_id
    assert bench.aborts == [bad.client_id]
    assert "can't be made" in caplog.text
    bench.give(good, C, finish="stop")
    assert good.result(10).outputs[0].text == "ABC"


def test_losing_the_last_reference_or_leaving_with_aborts(bench: Bench) -> None:
    output = bench.new()
    with output:
        pass
    assert output.aborted()
    lost = bench.new("STOP")
    client_id = lost.client_id
    del lost
    gc.collect()
    assert bench.ledger.take_dropped() == [client_id]


# -------------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_tokens_that_are_kept(bench: Bench) -> None:
    output = bench.new("STOP")
    token_ids = [AB, C, ST, OP]
    logprobs = [[Logprob(token_id, -float(token_id), 1), Logprob(99, -9.0, 2)] for token_id in token_ids]
    batch = StepBatch([output.client_id], token_ids, counts=[4], extras=[(0, RowExtra(logprobs=logprobs))])
    wake_all(bench.ledger.deliver(batch).woken)
    one = output.result(10).outputs[0]
    assert one.logprobs is not None
    assert [list(position) for position in one.logprobs] == [[AB, 99], [C, 99]]
    assert one.cumulative_logprob == -float(AB + C)
    assert one.logprobs_diff == one.logprobs


# ----------------------------------------------------------------------------------------------------------- crowds


def test_a_crowd_reads_all_of_its_outputs_as_they_come(bench: Bench) -> None:
    outputs = [bench.new("STOP") for _ in range(20)]
    crowd = Crowd()
    for output in outputs:
        crowd.add(output)
    thread = in_thread(lambda: crowd.wait(at_most=1))
    bench.give_all(outputs, [AB])
    bench.give_all(outputs[1:], [ST, OP])
    thread.join(10)
    assert not thread.is_alive()
    assert crowd.running == 1
    assert sorted(bench.aborts) == [output.client_id for output in outputs[1:]]
    bench.give(outputs[0], finish="length")
    crowd.wait()
    assert [output.outputs[0].text for output in outputs] == ["AB"] * 20


def test_a_crowd_raises_the_first_error(bench: Bench) -> None:
    outputs = [bench.new() for _ in range(3)]
    crowd = Crowd()
    for output in outputs:
        crowd.add(output)
    batch = StepBatch([outputs[1].client_id], [], counts=[0], extras=[(0, RowExtra(error=ErrorReport("bad")))])
    wake_all(bench.ledger.deliver(batch).woken)
    with pytest.raises(RequestError, match="bad"):
        crowd.wait()


@pytest.mark.timeout(60)
def test_a_result_filter_that_aborts_ends_the_text_with_what_had_come(bench: Bench) -> None:
    output = bench.new(filters=[lambda result: result.abort()])
    bench.give(output, AB, C)
    assert [(update.outputs[0].text_diff, update.outputs[0].finish_reason) for update in output] == [("ABC", "abort")]
    assert output.aborted()
    assert output.result(0) is output


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
def test_an_output_is_neither_copied_nor_pickled(bench: Bench, way: Callable[[object], object]) -> None:
    output = bench.new()
    with pytest.raises(TypeError, match="belongs to its LLM"):
        way(output)
    bench.give(output, AB, finish="stop")
    assert output.result(0).outputs[0].text == "AB"
