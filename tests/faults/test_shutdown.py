"""The end: from anywhere, at any time, within its bound, and nothing is left (which the `trace` of every test checks)."""

import os
import signal
import threading
import time

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Trace, Worlds, until
from tllm_core import EngineDeadError, ExecutorClosedError, GenerationResult, Overloaded
from tllm_core.engines.echo import expected_tokens

THREADS = 32
DEAD_BOUND_S = 5.0


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
