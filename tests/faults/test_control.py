"""Control calls: in order with requests, bounded on the caller's side, refused by name, and never left waiting for the dead."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds, until
from tllm_core import ControlError, EngineDeadError, ExecutorClosedError, GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens

PAUSE_S = 0.6


def test_what_the_engine_does_not_declare_is_refused_by_name(anywhere: Worlds) -> None:
    executor = anywhere()
    with pytest.raises(ControlError, match=r"no control method 'format_disk'; it has: .*ping.*stats"):
        asyncio.run(executor.acontrol("format_disk"))
    with pytest.raises(ControlError, match="there is no rank 5: the world has 1"):
        executor.control("ping", ranks=[5])
    with pytest.raises(ControlError, match="knob 17"):
        executor.control("fail", "knob 17")
    with pytest.raises(ControlError, match="pid does not take these arguments"):
        executor.control("pid", "an argument too many")
    assert executor.control("ping", 1, "two", [3.5, None]) == [[1, "two", [3.5, None]]]
    assert executor.check_health()


def test_each_rank_answers_and_one_can_be_chosen(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(world_size=2)
    assert executor.control("ping", 7) == [[7], [7]]
    assert executor.control("ping", 7, ranks=[1]) == [[7]]


def test_all_frontends_of_an_engine_read_the_same_totals(spawned: Worlds, tmp_path: Path) -> None:
    owner = spawned()
    owner.write_attach_file(tmp_path / "engine.json")
    with (
        GenerationExecutor.attach(tmp_path / "engine.json") as first,
        GenerationExecutor.attach(tmp_path / "engine.json") as second,
    ):
        for executor, count in ((owner, 3), (first, 4), (second, 5)):
            executor.generate([1, 2], SamplingParams(max_tokens=count))
        totals = [
            (stats.prompt_tokens, stats.generated_tokens, stats.steps)
            for stats in (owner.stats(), first.stats(), asyncio.run(second.astats()), owner.stats())
        ]
    assert totals == [(6, 12, 12)] * 4


def test_an_engine_without_kv_events_says_what_it_has(anywhere: Worlds) -> None:
    executor = anywhere()
    with pytest.raises(ControlError, match=r"no control method 'kv_events'; it has: .*ping.*stats"):
        executor.kv_events()
    with pytest.raises(ControlError, match=r"no control method 'kv_events'"):
        asyncio.run(executor.akv_events())


def test_calls_and_requests_stay_in_order(anywhere: Worlds) -> None:
    """A call sees each request that was submitted before it, and none that was aborted before it."""
    executor = anywhere(**SLOW)
    for _ in range(50):
        results = [executor.generate_async([i], LONG) for i in (1, 2)]
        stats = executor.stats()
        assert stats.running + stats.waiting == 2
        for result in results:
            result.abort()
        stats = executor.stats()
        assert stats.running + stats.waiting == 0


def test_a_paused_engine_is_no_dead_one_and_goes_on_where_it_was(anywhere: Worlds) -> None:
    executor = anywhere()
    executor.control("pause")
    result = executor.generate_async([1], SamplingParams(max_tokens=5))
    with pytest.raises(TimeoutError):
        result.result(2 * PAUSE_S)
    assert executor.check_health()
    executor.control("resume")
    assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([1], 5)


def test_a_deadline_is_the_callers_and_the_late_reply_is_dropped(anywhere: Worlds) -> None:
    executor = anywhere()
    with pytest.raises(ControlError, match=r"did not answer 'sleep_for' within 0.1 s"):
        executor.control("sleep_for", PAUSE_S, timeout=0.1)
    with pytest.raises(ControlError, match="did not answer 'stats' within 0 s"):
        executor.stats(timeout=0)
    until(lambda: executor.health().counters.get("late_replies", 0) == 2, "both late replies were counted")
    assert executor.control("ping", 1) == [[1]]
    assert len(executor._frontend.ledger) == 0
    assert executor.check_health()


def test_a_cancelled_call_is_forgotten(anywhere: Worlds) -> None:
    executor = anywhere()

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await executor.acontrol("sleep_for", PAUSE_S)
        assert len(executor._frontend.ledger) == 0
        assert await executor.acontrol("ping", 1) == [[1]]

    asyncio.run(cancel())


def test_two_calls_at_once_get_their_own_answers(anywhere: Worlds) -> None:
    executor = anywhere()
    answers: dict[int, Any] = {}

    def call(i: int) -> None:
        for k in range(20):
            answers[i * 100 + k] = executor.control("ping", i, k)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()

    async def many() -> list[Any]:
        return await asyncio.gather(*(executor.acontrol("ping", "loop", k) for k in range(20)))

    assert asyncio.run(many()) == [[["loop", k]] for k in range(20)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == {i * 100 + k: [[i, k]] for i in range(2) for k in range(20)}


def test_stats_in_a_loop_do_not_block_it(anywhere: Worlds) -> None:
    """The engine does not answer for a while; the loop goes on in the meantime."""
    executor = anywhere()

    async def ask() -> int:
        sleeping = asyncio.create_task(executor.acontrol("sleep_for", PAUSE_S))
        await asyncio.sleep(0)
        stats = asyncio.create_task(executor.astats())
        ticks = 0
        while not stats.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert (await stats).running == 0
        assert await sleeping == [None]
        return ticks

    assert asyncio.run(ask()) >= 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_pending_call_fails_with_the_engine(spawned: Worlds, how: int) -> None:
    executor = spawned()
    errors: list[BaseException] = []

    def sync() -> None:
        try:
            executor.control("sleep_for", 600.0, timeout=None)
        except EngineDeadError as error:
            errors.append(error)

    async def call(use: Callable[[], Any]) -> None:
        try:
            await use()
        except EngineDeadError as error:
            errors.append(error)

    async def both() -> None:
        await asyncio.gather(call(lambda: executor.acontrol("ping")), call(executor.astats))

    threads = [threading.Thread(target=sync), threading.Thread(target=lambda: asyncio.run(both()))]
    for thread in threads:
        thread.start()
    until(lambda: len(executor._frontend.ledger) == 3, "all three calls wait")
    os.kill(executor.health().ranks[0].pid, how)
    for thread in threads:
        thread.join(DEADLINE_S)
    words = "was killed by SIGKILL" if how == signal.SIGKILL else "is stopped"
    assert [words in str(error) for error in errors] == [True] * 3, errors
    with pytest.raises(EngineDeadError, match=words):
        executor.stats()


def test_a_call_that_kills_the_engine_raises_what_it_did(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(faults=[{"at": "control", "do": "exit", "exitcode": 9}])
    assert executor.stats().running == 0  # the worker answers this one itself
    with pytest.raises(EngineDeadError, match="rank 0 exited with code 9"):
        executor.control("ping")


def test_a_pending_call_ends_with_the_executor(anywhere: Worlds) -> None:
    executor = anywhere()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            executor.control("sleep_for", PAUSE_S)
        except ExecutorClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: len(executor._frontend.ledger) == 1, "the call waits")
    executor.shutdown(20)
    thread.join(DEADLINE_S)
    assert len(errors) == 1
    with pytest.raises(ExecutorClosedError):
        executor.stats()
