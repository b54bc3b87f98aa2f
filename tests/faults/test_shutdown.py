"""The end: from anywhere, at any time, within its bound, and nothing is left (which the `trace` of every test checks)."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Trace, Worlds, until
from tllm_core import (
    EngineDeadError,
    ExecutorClosedError,
    GenerationExecutor,
    GenerationResult,
    Overloaded,
    SamplingParams,
)
from tllm_core.engines.echo import expected_tokens

THREADS = 32
DEAD_BOUND_S = 5.0


def test_before_the_end_new_requests_are_refused_and_old_ones_go_on(anywhere: Worlds) -> None:
    executor = anywhere(**SLOW)
    result = executor.generate_async([1], SamplingParams(max_tokens=20))
    executor.pre_shutdown()
    executor.pre_shutdown()
    for _ in range(2):
        with pytest.raises(ExecutorClosedError, match="is shutting down: it takes no new requests"):
            executor.generate_async([2])
    stats = executor.stats()
    assert stats.running + stats.waiting == 1
    assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([1], 20)
    assert executor.health().in_flight == 0
    executor.shutdown(20)
    executor.pre_shutdown()
    with pytest.raises(ExecutorClosedError, match="was shut down"):
        executor.generate_async([2])


def test_one_frontend_that_leaves_keeps_no_other_from_submitting(spawned_ipc: Worlds, tmp_path: Path) -> None:
    owner = spawned_ipc()
    owner.write_attach_file(tmp_path / "engine.json")
    with GenerationExecutor.attach(tmp_path / "engine.json") as attached:
        attached.pre_shutdown()
        assert owner.generate([1], SamplingParams(max_tokens=2)).finished  # type: ignore[union-attr]
        with pytest.raises(ExecutorClosedError):
            attached.generate([1])


def test_a_signal_handler_and_a_finalizer_may_announce_the_end(spawned_ipc: Worlds) -> None:
    """The handler runs on this thread while `submit` holds its locks, thousands of times over."""
    executor = spawned_ipc()

    class Finalized:
        def __del__(self) -> None:
            executor.pre_shutdown()

    def announce(number: int, frame: object) -> None:
        cycle: list[object] = [Finalized()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        calls.append(executor.pre_shutdown())

    calls: list[None] = []
    before = signal.signal(signal.SIGALRM, announce)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.001)
    try:
        results = []
        with pytest.raises(ExecutorClosedError, match="is shutting down"):  # noqa: PT012
            while True:
                try:
                    results.append(executor.generate_async([1], SamplingParams(max_tokens=2)))
                except Overloaded:
                    executor.wait_for_room()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls
    for result in results:
        assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([1], 2)


def test_after_the_death_the_death_is_what_is_told(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(**SLOW)
    result = executor.generate_async([1], LONG)
    executor.pre_shutdown()
    os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        result.result(DEADLINE_S)
    executor.pre_shutdown()
    with pytest.raises(EngineDeadError):
        executor.generate_async([1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_announces_nothing(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc()
    child = os.fork()
    if child == 0:
        try:
            executor.pre_shutdown()
            os._exit(executor._frontend._leaving)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert executor.generate([1], SamplingParams(max_tokens=2)).finished  # type: ignore[union-attr]


def test_an_exception_in_the_with_block_is_the_one_that_is_raised(anywhere: Worlds) -> None:
    executor = anywhere(**SLOW)
    results: list[GenerationResult] = []
    with pytest.raises(ZeroDivisionError), executor:  # noqa: PT012
        results.append(next(executor.generate_async([1], LONG)))
        _ = 1 / 0
    (result,) = results
    with pytest.raises(ExecutorClosedError):
        result.result(0)
    tokens = result.outputs[0].token_ids
    assert tokens == expected_tokens([1], len(tokens))


def test_two_threads_that_end_it_at_once_both_return_after_the_end(anywhere: Worlds, trace: Trace) -> None:
    executor = anywhere(**SLOW)
    result = executor.generate_async([1], LONG)
    next(result)
    left: list[dict[int, str]] = []

    def end() -> None:
        executor.shutdown(20)
        left.append(trace.processes())

    threads = [threading.Thread(target=end) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert left == [{}, {}]


def test_while_32_threads_submit_each_gets_one_clear_error(anywhere: Worlds) -> None:
    executor = anywhere(**SLOW)
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            while True:
                try:
                    executor.generate_async([1], LONG).result(0.01)
                except (TimeoutError, Overloaded):
                    continue
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=submit) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    until(lambda: executor.stats().running > 0, "requests run")
    executor.shutdown(20)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {type(error) for error in errors} == {ExecutorClosedError}, errors
    assert len(errors) == THREADS
    assert executor.health().in_flight == 0


def test_a_hung_engine_is_killed_once_the_bound_is_over(spawned: Worlds, trace: Trace) -> None:
    executor = spawned(faults=[{"at": "step", "do": "hang"}])
    result = executor.generate_async([1], LONG)
    until(lambda: executor._frontend.last_beat is not None and executor._frontend.last_beat.busy, "it hangs in a step")
    executor.shutdown(1)
    assert trace.processes() == {}
    with pytest.raises(ExecutorClosedError):
        result.result(0)


def test_a_dead_engine_does_not_take_the_whole_timeout(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(world_size=2, **SLOW)
    os.kill(executor.health().ranks[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        executor.generate_async([1], LONG).result(DEADLINE_S)
    began = time.monotonic()
    executor.shutdown(600)
    took_s = time.monotonic() - began
    print(f"took {took_s:.2f} s")
    assert took_s < 4 * DEAD_BOUND_S
    with pytest.raises(EngineDeadError):
        executor.generate_async([1])


def test_a_shutdown_right_after_the_death_does_not_hide_it(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(**SLOW)
    result = executor.generate_async([1], LONG)
    next(result)
    os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
    assert executor.wait_ended(DEADLINE_S)
    executor.shutdown(20)
    with pytest.raises(EngineDeadError, match="rank 0"):
        result.result(0)


def test_a_thread_creates_uses_and_ends_it_and_signal_handlers_stay(spawned_ipc: Worlds) -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        got: list[list[int]] = []

        def work() -> None:
            executor = spawned_ipc()
            got.append(executor.generate_async([4]).result(DEADLINE_S).outputs[0].token_ids[:3])
            executor.shutdown(20)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(DEADLINE_S)
        assert got == [expected_tokens([4], 3)]
        assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
