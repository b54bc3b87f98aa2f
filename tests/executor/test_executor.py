"""GenerationExecutor with the echo engine over every pair of transport and launcher: real sockets, real processes."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tllm_core import (
    LLM,
    ConfigError,
    ControlError,
    EngineDeadError,
    EngineStartError,
    ExecutorClosedError,
    GenerationExecutor,
    RequestError,
    SamplingParams,
)
from tllm_core.config import load_settings
from tllm_core.engines.echo import expected_tokens

PAIRS = [
    pytest.param(("inproc", "inline", {}), id="inproc-inline"),
    pytest.param(("zmq", "inline", {}), id="zmq-inline"),
    pytest.param(("zmq", "spawn", {}), id="zmq-ipc-spawn"),
    pytest.param(("zmq", "spawn", {"protocol": "tcp"}), id="zmq-tcp-spawn"),
]
SLOW = {"step_interval_s": 0.02}


def make(pair: Any, **engine_options: Any) -> GenerationExecutor:
    transport, launcher, options = pair
    return GenerationExecutor.create(
        transport=transport, transport_options=options, launcher=launcher, engine="echo", engine_options=engine_options
    )


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def executor(pair: Any) -> Iterator[GenerationExecutor]:
    with make(pair) as executor:
        yield executor


@pytest.fixture(scope="module")
def slow(pair: Any) -> Iterator[GenerationExecutor]:
    with make(pair, **SLOW) as executor:
        yield executor


def until(condition: Callable[[], bool], what: str) -> None:
    tick = threading.Event()
    for _ in range(2_000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError(f"never came true: {what}")


def test_streaming_yields_diffs_that_add_up(executor: GenerationExecutor) -> None:
    result = executor.generate_async([1, 2, 3], SamplingParams(max_tokens=8), streaming=True)
    diffs = [r.outputs[0].token_ids_diff for r in result]
    assert [token for diff in diffs for token in diff] == expected_tokens([1, 2, 3], 8)
    assert result.finished
    assert result.outputs[0].finish_reason == "length"
    assert not result.aborted()
    assert executor.health().in_flight == 0


def test_generate_keeps_the_shape_of_its_input(executor: GenerationExecutor) -> None:
    params = SamplingParams(max_tokens=4)
    one = executor.generate([7, 8], params)
    assert not isinstance(one, list)
    assert one.outputs[0].token_ids == expected_tokens([7, 8], 4)
    many = executor.generate([[1, 2], [3]], params)
    assert isinstance(many, list)
    assert [r.outputs[0].token_ids for r in many] == [expected_tokens([1, 2], 4), expected_tokens([3], 4)]
    assert executor.generate([]) == []
    each = executor.generate([[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert isinstance(each, list)
    assert [r.outputs[0].length for r in each] == [1, 2]


def test_sync_threads_and_two_event_loops_share_one_executor(executor: GenerationExecutor) -> None:
    wrong: list[str] = []

    def check(tokens: list[int], prompt: list[int], count: int) -> None:
        if tokens != expected_tokens(prompt, count):
            wrong.append(f"{prompt}: {tokens}")

    def sync(base: int) -> None:
        for i in range(20):
            prompt = [base, i]
            check(
                executor.generate_async(prompt, SamplingParams(max_tokens=5)).result(30).outputs[0].token_ids, prompt, 5
            )

    async def stream(base: int, i: int) -> None:
        prompt, tokens = [base, i], []
        async for r in executor.generate_async(prompt, SamplingParams(max_tokens=17)):
            tokens += r.outputs[0].token_ids_diff
        check(tokens, prompt, 17)

    async def loop(base: int) -> None:
        await asyncio.gather(*(stream(base, i) for i in range(20)))

    threads = [threading.Thread(target=sync, args=(base,)) for base in (10, 11)]
    threads += [threading.Thread(target=lambda base=base: asyncio.run(loop(base))) for base in (20, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_n_sequences_come_back_under_their_index(executor: GenerationExecutor) -> None:
    result = executor.generate_async([5, 6], SamplingParams(n=3, max_tokens=6)).result(30)
    assert [o.token_ids for o in result.outputs] == [expected_tokens([5, 6], 6, index) for index in range(3)]
    assert [o.finish_reason for o in result.outputs] == ["length"] * 3


def test_logprobs_are_aligned_with_tokens(executor: GenerationExecutor) -> None:
    output = executor.generate_async([5], SamplingParams(max_tokens=4, logprobs=2)).result(30).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 4
    assert all(token in row for token, row in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob is not None


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], SamplingParams(), "prompt_token_ids"),
        ([-1], SamplingParams(), "prompt_token_ids"),
        ([2**31], SamplingParams(), "prompt_token_ids"),
        ([32000], SamplingParams(), "prompt_token_ids"),
        ("text", SamplingParams(), "prompt_token_ids"),
        ([1.5], SamplingParams(), "prompt_token_ids"),
        (5, SamplingParams(), "prompt_token_ids"),
        ([[1]], SamplingParams(), "prompt_token_ids"),
        ([1] * 5000, SamplingParams(), "prompt_token_ids"),
        ([1] * 4000, SamplingParams(max_tokens=97), "max_tokens"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(max_tokens=True), "max_tokens"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(temperature=-1), "temperature"),
        ([1], SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
        ([1], SamplingParams(temperature=0.5), "temperature"),
        ([1], SamplingParams(stop=("x",)), "stop"),
        ([1], SamplingParams(stop="x"), "stop"),  # type: ignore[arg-type]
        ([1], SamplingParams(n=0), "n"),
        ([1], SamplingParams(stop_token_ids=(-5,)), "stop_token_ids"),
        ([1], SamplingParams(min_tokens=5, max_tokens=4), "min_tokens"),
        ([1], SamplingParams(stop_token_ids=(32000,)), "stop_token_ids"),
    ],
)
def test_bad_input_is_refused_here_by_name(
    executor: GenerationExecutor, prompt: Any, params: SamplingParams, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        executor.generate_async(prompt, params)
    assert caught.value.field == field
    assert len(executor._frontend.ledger) == 0
    assert executor.check_health()


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": [1]}, b"\x01", "text", [None], [[1], "text"]])
def test_odd_shapes_are_refused_by_name(executor: GenerationExecutor, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        executor.generate(prompts, SamplingParams(max_tokens=1))
    assert caught.value.field in ("prompts", "prompt_token_ids")
    assert executor.health().in_flight == 0


def test_prompts_may_be_any_iterable_and_parameters_a_mapping(executor: GenerationExecutor) -> None:
    results = executor.generate(((i, 1) for i in range(3)), {"max_tokens": 2})  # type: ignore[arg-type]
    assert isinstance(results, list)
    assert [r.outputs[0].token_ids for r in results] == [expected_tokens([i, 1], 2) for i in range(3)]


def test_who_aborts_sees_the_end_at_once(slow: GenerationExecutor) -> None:
    result = slow.generate_async([1, 2], SamplingParams(max_tokens=4000))
    next(result)
    result.abort()
    assert result.finished
    assert result.outputs[0].finish_reason == "abort"
    assert hash(result) == result.client_id


def test_a_limit_error_names_both_numbers(executor: GenerationExecutor) -> None:
    with pytest.raises(RequestError, match=r"4000 .*97 .*4097.*4096"):
        executor.generate_async([1] * 4000, SamplingParams(max_tokens=97))


def test_result_timeout_leaves_the_request_alive(slow: GenerationExecutor) -> None:
    result = slow.generate_async([1], SamplingParams(max_tokens=20))
    with pytest.raises(TimeoutError):
        result.result(timeout=0.05)
    assert result.result(timeout=60).outputs[0].token_ids == expected_tokens([1], 20)
    assert result.result(timeout=0) is result


@pytest.mark.parametrize("how", ["abort", "by id", "with", "last reference"])
def test_an_abort_frees_the_engine(slow: GenerationExecutor, how: str) -> None:
    result = slow.generate_async([1, 2], SamplingParams(max_tokens=4000))
    next(result)
    if how == "abort":
        result.abort()
        result.abort()
    elif how == "by id":
        slow.abort(result.client_id)
        slow.abort(123456789)
    elif how == "with":
        with result:
            pass
    if how == "last reference":
        del result
        gc.collect()
    else:
        list(result)
        assert result.aborted()
        assert result.outputs[0].finish_reason == "abort"
        tokens = result.outputs[0].token_ids
        assert tokens == expected_tokens([1, 2], len(tokens))
    until(lambda: slow.stats().running == 0, "the engine runs nothing")
    assert slow.health().in_flight == 0


def test_timeout_s_ends_a_request_with_its_reason(slow: GenerationExecutor) -> None:
    result = slow.generate_async([3], SamplingParams(max_tokens=4000), timeout_s=0.2).result(60)
    assert result.outputs[0].finish_reason == "timeout"
    until(lambda: slow.stats().running == 0, "the engine runs nothing")


def test_control_calls_answer_refuse_and_are_named(executor: GenerationExecutor) -> None:
    assert executor.stats().running == 0
    assert asyncio.run(executor.astats()).running == 0
    with pytest.raises(ControlError, match="no control method 'format_disk'"):
        executor.control("format_disk")


def test_used_in_two_loops_one_after_the_other(executor: GenerationExecutor) -> None:
    async def once() -> list[int]:
        return (await executor.generate_async([9], SamplingParams(max_tokens=3))).outputs[0].token_ids

    assert asyncio.run(once()) == asyncio.run(once()) == expected_tokens([9], 3)


def test_one_failing_request_harms_no_other(pair: Any) -> None:
    fault = {"at": "step", "do": "request_error", "token": 13, "message": "poison"}
    with make(pair, faults=[fault], **SLOW) as executor:
        good = [executor.generate_async([i], SamplingParams(max_tokens=10)) for i in (1, 2)]
        with pytest.raises(RequestError, match="poison"):
            executor.generate_async([13], SamplingParams(max_tokens=10)).result(30)
        refused = executor.generate_async([13], SamplingParams(max_tokens=10))
        with pytest.raises(RequestError, match="poison"):
            list(refused)
        for i, result in zip((1, 2), good, strict=True):
            assert result.result(30).outputs[0].token_ids == expected_tokens([i], 10)
        assert executor.check_health()


def test_a_crash_in_a_step_ends_everything_with_its_traceback(pair: Any) -> None:
    executor = make(pair, faults=[{"at": "step", "do": "raise", "after": 5, "message": "knob 17"}], **SLOW)
    try:
        results = [executor.generate_async([i], SamplingParams(max_tokens=4000)) for i in range(1, 9)]
        for i, result in enumerate(results, 1):
            with pytest.raises(EngineDeadError, match="knob 17"):
                result.result(30)
            tokens = result.outputs[0].token_ids
            assert tokens == expected_tokens([i], len(tokens))
        with pytest.raises(EngineDeadError, match="knob 17"):
            executor.generate_async([1])
        assert not executor.check_health()
        assert "knob 17" in (executor.health().cause or "")
    finally:
        executor.shutdown(5)


def test_a_start_that_fails_raises_the_childs_own_error(pair: Any) -> None:
    with pytest.raises(EngineStartError, match=r"knob 18") as caught:
        make(pair, faults=[{"at": "start", "do": "raise", "message": "bad knob 18"}])
    assert "Traceback" in (caught.value.root_cause.traceback or "")


def test_shutdown_is_idempotent_and_ends_what_is_pending(pair: Any) -> None:
    executor = make(pair, **SLOW)
    result = executor.generate_async([1], SamplingParams(max_tokens=4000))
    next(result)
    threads = [threading.Thread(target=executor.shutdown, args=(10,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(ExecutorClosedError):
        result.result(0)
    with pytest.raises(ExecutorClosedError):
        executor.generate_async([1])
    executor.shutdown()
    assert executor.health().state == "closed"


def test_nothing_is_left_after_shutdown(pair: Any) -> None:
    make(pair).shutdown()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with make(pair) as executor:
            executor.generate([1], SamplingParams(max_tokens=2))
    until(lambda: threading.active_count() <= threads, "threads are gone")
    until(lambda: len(os.listdir("/proc/self/fd")) <= fds, "file descriptors are closed")


def test_a_dropped_executor_ends_its_world(pair: Any) -> None:
    executor = make(pair)
    frontend = executor._frontend
    del executor
    gc.collect()
    until(frontend._closed.is_set, "the world was ended")


class TestProcesses:
    """What only a world of its own processes has."""

    @staticmethod
    def spawned(**engine_options: Any) -> GenerationExecutor:
        return make(("zmq", "spawn", {}), **engine_options)

    def test_sigkill_wakes_every_stream_with_the_cause(self) -> None:
        executor = self.spawned(**SLOW)
        try:
            results = [executor.generate_async([i], SamplingParams(max_tokens=4000)) for i in range(1, 17)]
            for result in results:
                next(result)
            os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
            for result in results:
                with pytest.raises(EngineDeadError, match="rank 0 was killed by SIGKILL"):
                    list(result)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                executor.generate_async([1])
        finally:
            executor.shutdown(5)

    def test_a_forked_child_cannot_touch_the_parents_engine(self) -> None:
        with self.spawned() as executor:
            pid = os.fork()
            if pid == 0:
                refused = []
                for call in (lambda: executor.generate_async([1]), lambda: executor.abort(1), executor.stats):
                    try:
                        call()
                    except ExecutorClosedError:
                        refused.append(call)
                executor.shutdown()
                os._exit(42 if len(refused) == 3 and not executor.check_health() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
            assert executor.generate([1], SamplingParams(max_tokens=2))
            assert executor.check_health()


def test_a_pair_that_cannot_work_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"inproc.*zmq"):
        GenerationExecutor.create(transport="inproc", launcher="spawn", engine="echo")


def test_no_engine_says_how_to_choose_one() -> None:
    with pytest.raises(ConfigError, match=r"engine.*echo"):
        GenerationExecutor.create()


def test_generate_submits_as_room_appears() -> None:
    """The lane's window and backlog hold 8 messages; 200 prompts go through all the same, also from several threads."""
    small = {"window_frames": 4, "backlog_frames": 4}
    overrides = {"engine.name": "echo", "launcher.name": "inline", **{f"wire.{key}": n for key, n in small.items()}}
    prompts = [[i, 1] for i in range(200)]
    expected = [expected_tokens(prompt, 3) for prompt in prompts]
    got: list[list[list[int]]] = []
    with GenerationExecutor.create(load_settings(None, overrides=overrides)) as executor, LLM(executor=executor) as llm:
        params = SamplingParams(max_tokens=3)

        def by_executor() -> None:
            got.append([result.outputs[0].token_ids for result in executor.generate(prompts, params)])  # type: ignore[union-attr]

        def by_llm() -> None:
            got.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])

        threads = [threading.Thread(target=work) for work in (by_executor, by_llm, by_executor, by_llm)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert got == [expected] * 4
