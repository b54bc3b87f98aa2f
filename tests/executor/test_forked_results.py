"""What a process inherits of an executor by fork() raises at once: nothing is delivered there."""

import asyncio
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tllm_core import ExecutorClosedError, GenerationExecutor, GenerationResult, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
WORDS = "this executor belongs to the process that this one was forked from"
BOUND_S = 20


@pytest.fixture(scope="module", params=[("inproc", "inline"), ("zmq", "spawn")], ids=["inline", "spawn"])
def executor(request: pytest.FixtureRequest) -> Iterator[GenerationExecutor]:
    transport, launcher = request.param
    options = {"step_interval_s": 0.01}
    with GenerationExecutor.create(
        transport=transport, launcher=launcher, engine="echo", engine_options=options
    ) as executor:
        yield executor


def in_child(work: Callable[[], object]) -> None:
    """Runs `work` in a fork, which must raise there what a closed executor does; SIGALRM ends a child that hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(BOUND_S)
        try:
            work()
        except ExecutorClosedError as error:
            os._exit(0 if WORDS in str(error) else 2)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child hung, or raised something else"


def exhaust(result: GenerationResult) -> None:
    for _ in result:
        pass


async def exhaust_async(result: GenerationResult) -> None:
    async for _ in result:
        pass


async def await_it(result: GenerationResult) -> None:
    await result


WAYS: dict[str, Callable[[GenerationExecutor, GenerationResult], Any]] = {
    "result": lambda executor, result: result.result(),
    "iterate": lambda executor, result: exhaust(result),
    "aiterate": lambda executor, result: asyncio.run(exhaust_async(result)),
    "await": lambda executor, result: asyncio.run(await_it(result)),
    "aresult": lambda executor, result: asyncio.run(result.aresult()),
    "wait_ended": lambda executor, result: executor.wait_ended(),
    "wait_world_ended": lambda executor, result: executor.wait_world_ended(),
    "abort_all": lambda executor, result: executor.abort_all(),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_inherited_result_raises_at_once(executor: GenerationExecutor, way: str) -> None:
    result = executor.generate_async([1, 2, 3], SamplingParams(max_tokens=100))
    next(iter(result))
    in_child(lambda: WAYS[way](executor, result))
    assert result.outputs[0].finish_reason is None
    exhaust(result)  # the parent's own goes on to its end
    assert result.outputs[0].length == 100


def test_a_result_that_had_ended_can_be_read_in_a_fork(executor: GenerationExecutor) -> None:
    result = executor.generate_async([1], SamplingParams(max_tokens=2)).result(30)

    def read() -> None:
        assert result.result(0).outputs[0].length == 2
        executor.submit(result.request)

    in_child(read)


def test_a_fork_while_a_thread_holds_the_ledger_does_not_hang(executor: GenerationExecutor) -> None:
    result = executor.generate_async([1], SamplingParams(max_tokens=100))
    with executor._frontend.ledger._lock:
        in_child(result.result)
