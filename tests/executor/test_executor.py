"""GenerationExecutor with the echo engine over every pair of transport and launcher: real sockets, real processes."""

import asyncio
import gc
import os
import signal
import threading
from array import array
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
    GuidedDecoding,
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


def short(value: object) -> str:
    return value if isinstance(value, str) and value.isidentifier() else type(value).__name__


SELF_REFERRING: list[Any] = []
SELF_REFERRING.append(SELF_REFERRING)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("timeout_s", value) for value in (0, -1.0, True, "1", 10**400, 10**30, float("nan"), float("inf"))),
        *(("priority", value) for value in (2**70, -(2**63) - 1, 10**5000, 1.0, None)),
        *(("cache_salt", value) for value in (5, b"salt", "\ud800")),
        *(("trace_context", value) for value in ("x", {"a": 1}, {1: "a"}, {"\ud800": "a"}, [])),
        *(("extra", value) for value in (5, [], {1: 2}, {"a": object()}, {"a": {"b": {0: 1}}}, {"a": "\ud800"})),
        *(("extra", {"a": value}) for value in (2**64, -(2**63) - 1, {1, 2}, SELF_REFERRING)),
        *(("streaming", value) for value in (5, None)),
    ],
    ids=short,
)
def test_a_field_of_a_wrong_type_is_refused_here_by_name(executor: GenerationExecutor, field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} ") as caught:
        executor.generate_async([1], SamplingParams(max_tokens=1), **{field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 400
    assert len(executor._frontend.ledger) == 0
    assert executor.check_health()


def test_plain_data_of_every_kind_arrives(executor: GenerationExecutor) -> None:
    tag: Any = [None, True, -(2**63), 2**64 - 1, 0.5, "é", b"\x00\xff", [1, [2]], {"a": {"": []}}]
    assert executor.control("ping", *tag, (1, 2))[0][:-1] == tag


@pytest.mark.parametrize("value", [object(), 2**64, "\ud800", {1: 2}, SELF_REFERRING, {1}], ids=short)
def test_an_argument_that_cannot_be_sent_is_refused_here(executor: GenerationExecutor, value: Any) -> None:
    with pytest.raises(ControlError, match=r"^an argument of 'ping' has "):
        executor.control("ping", 1, [value])
    with pytest.raises(ControlError, match=r"^an argument of 'ping' has "):
        asyncio.run(executor.acontrol("ping", value))
    assert executor.control("ping", 1)[0] == [1]


@pytest.mark.parametrize("ranks", [5, "some", [0.5], [-1], [2**70], [True], None])
def test_ranks_that_are_none_are_refused_here(executor: GenerationExecutor, ranks: Any) -> None:
    with pytest.raises(ControlError, match="ranks must be"):
        executor.control("ping", ranks=ranks)


NO_TIMES = [float("nan"), -1e9, -1e18, -float("inf"), -1, "x", True, -(10**400)]
FOR_EVER = [float("inf"), 1e300, 10**400, None]


@pytest.mark.parametrize("timeout", NO_TIMES, ids=short)
def test_a_timeout_that_is_no_time_is_refused_here(executor: GenerationExecutor, timeout: Any) -> None:
    words = "timeout must be a number of seconds, 0 or more, or None, not"
    with pytest.raises(ControlError, match=words):
        executor.control("stats", timeout=timeout)
    with pytest.raises(ControlError, match=words):
        executor.stats(timeout=timeout)
    result = executor.generate_async([1], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=words):
        result.result(timeout=timeout)
    for wait in (executor.wait_ended, executor.wait_world_ended, executor.shutdown):
        with pytest.raises(ValueError, match=words):
            wait(timeout=timeout)
    assert result.result(30).outputs[0].length == 1
    assert executor.check_health()


@pytest.mark.parametrize("timeout", FOR_EVER, ids=short)
def test_an_enormous_timeout_waits_for_ever(executor: GenerationExecutor, timeout: Any) -> None:
    executor.control("stats", timeout=timeout)
    assert executor.stats(timeout=timeout).running == 0
    result = executor.generate_async([1], SamplingParams(max_tokens=1))
    assert result.result(timeout=timeout).outputs[0].length == 1


def test_a_shutdown_may_have_all_the_time_there_is(pair: Any) -> None:
    executor = make(pair)
    executor.shutdown(timeout=float("inf"))
    assert executor.wait_ended(timeout=10**400)


def test_an_answer_that_nobody_could_check_is_still_the_requests_error(executor: GenerationExecutor) -> None:
    """A subclass of str that the codec does not know."""

    class Text(str):
        __slots__ = ()

    params = SamplingParams(max_tokens=1, guided=GuidedDecoding(regex=Text("a")))
    with pytest.raises(RequestError):
        executor.generate_async([1], params)
    assert executor.generate([1], SamplingParams(max_tokens=1)).outputs[0].length == 1  # type: ignore[union-attr]


class OddIndex:
    def __index__(self) -> int:
        raise KeyError("odd")


@pytest.mark.parametrize(
    "prompt",
    [
        b"abc",
        bytearray(b"abc"),
        bytearray(b"abcd"),
        memoryview(b"ab"),
        memoryview(b"ab").cast("b"),
        memoryview(b"ab").cast("c"),
        array("B", [1, 2]),
        [OddIndex()],
        (1 // number for number in (1, 0)),
    ],
    ids=short,
)
def test_bytes_and_what_cannot_be_read_are_no_prompt(executor: GenerationExecutor, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        executor.generate_async(prompt, SamplingParams(max_tokens=1))
    assert caught.value.field == "prompt_token_ids"


@pytest.mark.parametrize("kind", "ilqhI")
def test_integer_buffers_are_token_ids(executor: GenerationExecutor, kind: str) -> None:
    ids = array(kind, [1, 2, 3])
    for prompt in (ids, memoryview(ids)):
        result = executor.generate_async(prompt, SamplingParams(max_tokens=2)).result(30)  # type: ignore[arg-type]
        assert result.outputs[0].token_ids == expected_tokens([1, 2, 3], 2)


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
