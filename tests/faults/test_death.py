"""The death of an engine: everybody who waits for it hears at once, with the first cause, after what had arrived."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Trace, Worlds, until
from tllm_core import EngineDeadError, GenerationExecutor, GenerationResult
from tllm_core.engines.echo import expected_tokens


def rank_pid(executor: GenerationExecutor, rank: int = 0) -> int:
    return executor.health().ranks[rank].pid


def watcher_pid(executor: GenerationExecutor) -> int:
    pid: int = executor.describe()["world"]["watcher"]  # type: ignore[call-overload,index,assignment]
    return pid


def test_tokens_that_nobody_had_read_come_before_the_error(spawned: Worlds) -> None:
    executor = spawned(**SLOW)
    results = [executor.generate_async([i, 5], LONG) for i in range(1, 9)]
    until(lambda: all(len(result.mailbox.rows) >= 5 for result in results), "tokens have arrived")
    arrived = [len(result.mailbox.rows) for result in results]
    os.kill(rank_pid(executor), signal.SIGKILL)
    assert executor.wait_ended(DEADLINE_S)
    for i, (result, count) in enumerate(zip(results, arrived, strict=True), 1):
        until(lambda result=result: result.mailbox.outcome is not None, "it has its outcome")
        tokens = next(result).outputs[0].token_ids_diff
        assert len(tokens) >= count
        assert tokens == expected_tokens([i, 5], len(tokens))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            next(result)


def test_later_submits_and_calls_raise_without_touching_the_transport(
    spawned: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = spawned()
    os.kill(rank_pid(executor), signal.SIGKILL)
    until(lambda: executor._frontend.ledger.closed is not None, "it was swept")
    sent: list[Any] = []
    monkeypatch.setattr(executor._frontend.link, "send", sent.append)
    uses: list[Callable[[], Any]] = [
        lambda: executor.generate_async([1]),
        lambda: executor.generate([[1], [2]]),
        executor.stats,
        lambda: executor.control("ping"),
        lambda: asyncio.run(executor.astats()),
    ]
    for use in uses:
        with pytest.raises(EngineDeadError, match="rank 0 was killed by SIGKILL"):
            use()
    assert sent == []


def test_a_request_that_waits_in_the_engine_hears_as_fast_as_the_running_one(spawned: Worlds) -> None:
    executor = spawned(max_batch_size=1, **SLOW)
    running, *queued = [executor.generate_async([i], LONG) for i in range(1, 9)]
    next(running)
    os.kill(rank_pid(executor), signal.SIGKILL)
    for result in (*queued, running):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            result.result(DEADLINE_S)
    assert [result.outputs[0].token_ids for result in queued] == [[]] * 7
    assert len(executor._frontend.ledger) == 0


@pytest.mark.parametrize(
    ("fault", "words", "exitcode"),
    [
        ({"do": "exit", "exitcode": 0}, "rank 0 exited with code 0", 0),
        ({"do": "exit", "exitcode": 3}, "rank 0 exited with code 3", 3),
        ({"do": "kill", "signal": 11}, "rank 0 was killed by SIGSEGV", -11),
    ],
)
def test_an_exit_that_nobody_asked_for_is_a_death_even_a_clean_one(
    spawned_ipc: Worlds, fault: dict[str, Any], words: str, exitcode: int
) -> None:
    executor = spawned_ipc(faults=[{"at": "step", "after": 3, **fault}], **SLOW)
    results = [executor.generate_async([i], LONG) for i in (1, 2)]
    for result in results:
        with pytest.raises(EngineDeadError, match=words) as caught:
            result.result(DEADLINE_S)
        assert (caught.value.root_cause.rank, caught.value.root_cause.exitcode) == (0, exitcode)
    assert executor.health().state == "dead"


@pytest.mark.parametrize("at", ["submit", "abort"])
def test_a_crash_of_the_loop_in_a_living_process_is_a_death(anywhere: Worlds, at: str) -> None:
    executor = anywhere(faults=[{"at": at, "do": "raise", "token": 13, "message": "knob 17"}], **SLOW)
    others = [executor.generate_async([i], LONG) for i in (1, 2)]
    for result in others:
        next(result)
    executor.generate_async([13], LONG).abort()
    for result in others:
        with pytest.raises(EngineDeadError, match="RuntimeError: knob 17") as caught:
            result.result(DEADLINE_S)
        assert "Traceback" in (caught.value.root_cause.traceback or "")
    with pytest.raises(EngineDeadError, match="knob 17"):
        executor.stats()


def test_the_death_of_the_watcher_is_the_worlds(spawned: Worlds, trace: Trace) -> None:
    executor = spawned(world_size=2, **SLOW)
    results = [executor.generate_async([i], LONG) for i in (1, 2, 3)]
    for result in results:
        next(result)
    os.kill(watcher_pid(executor), signal.SIGKILL)
    for result in results:
        with pytest.raises(EngineDeadError, match="watcher was killed by SIGKILL"):
            result.result(DEADLINE_S)
    trace.until_gone()


def test_the_death_of_the_watcher_leaves_no_file_once_the_owner_was_shut_down(
    spawned_ipc: Worlds, trace: Trace
) -> None:
    executor = spawned_ipc()
    os.kill(watcher_pid(executor), signal.SIGKILL)
    assert executor.wait_ended(DEADLINE_S)
    executor.shutdown(20)
    assert trace.files() == []


def test_the_death_of_any_rank_is_the_worlds(spawned: Worlds, trace: Trace) -> None:
    executor = spawned(world_size=2, **SLOW)
    result = executor.generate_async([1], LONG)
    next(result)
    os.kill(rank_pid(executor, 1), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="engine rank 1 was killed by SIGKILL") as caught:
        list(result)
    assert caught.value.root_cause.rank == 1
    trace.until_gone()


def test_a_second_cause_does_not_replace_the_first(spawned_ipc: Worlds, trace: Trace) -> None:
    executor = spawned_ipc(world_size=2, **SLOW)
    early = executor.generate_async([1], LONG)
    watcher, first = watcher_pid(executor), rank_pid(executor)
    next(early)
    os.kill(rank_pid(executor, 1), signal.SIGUSR1)
    assert executor.wait_ended(DEADLINE_S)
    for pid in (first, watcher):
        if pid in trace.processes():
            os.kill(pid, signal.SIGKILL)
    trace.until_gone()
    words = "engine rank 1 was killed by SIGUSR1"
    with pytest.raises(EngineDeadError, match=words):
        early.result(DEADLINE_S)
    with pytest.raises(EngineDeadError, match=words):
        executor.generate_async([1])
    assert "SIGKILL" not in (executor.health().cause or "")


def test_a_follower_that_is_asked_to_end_by_somebody_else_is_a_death_that_names_it(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(world_size=2, **SLOW)
    result = executor.generate_async([1], LONG)
    next(result)
    os.kill(rank_pid(executor, 1), signal.SIGTERM)
    with pytest.raises(EngineDeadError, match=r"engine rank 1 (was killed by SIGTERM|exited|ended)"):
        result.result(DEADLINE_S)


def test_results_and_health_say_the_same_cause_each_time_they_are_asked(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(**SLOW)
    result: GenerationResult = executor.generate_async([1], LONG)
    next(result)
    os.kill(rank_pid(executor), signal.SIGKILL)
    raised = []
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
            result.result(DEADLINE_S)
        raised.append(caught.value)
    assert len({id(error) for error in raised}) == 3  # no shared traceback that grows
    assert len({str(error) for error in raised} | {executor.health().cause}) == 1
    assert not executor.check_health()


FELLOWS = """
import os, socket, threading
from tllm_core.contracts.interfaces import Engine
from tllm_core.contracts.messages import EngineInfo, Step

class FellowEngine(Engine):
    '''Each rank hears of the other's end by itself, as in a collective call, and fails over it.'''

    def start(self, context):
        if context.rank == 0:
            self.peer = socket.socket(fileno=os.dup(context.rendezvous_fd)).accept()[0]
        else:
            host, port = context.rendezvous.split(":")
            self.peer = socket.create_connection((host, int(port)))
        return EngineInfo(model="fellow")

    def follow(self):
        self.peer.recv(1)
        raise RuntimeError("connection closed by peer")

    def submit(self, request):
        self.step = self.follow

    def step(self): return Step((), False)
    def abort(self, request_id): pass
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_was_killed_is_the_cause_and_not_the_one_that_failed_over_it(
    spawned_ipc: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fellow.py").write_text(FELLOWS)
    (tmp_path / "fellow_spec.py").write_text(
        "from msgspec import Struct\n"
        "from tllm_core.contracts.interfaces import EngineSpec\n"
        "class Settings(Struct): pass\n"
        "def ranks(settings): return 2\n"
        "SPEC = EngineSpec(\n"
        "    name='fellow', settings_type=Settings, load='fellow:FellowEngine', world_size='fellow_spec:ranks')\n"
    )
    monkeypatch.delitem(sys.modules, "fellow_spec", raising=False)
    executor = spawned_ipc("fellow_spec:SPEC")
    result = executor.generate_async([1])
    until(lambda: executor._frontend.last_beat is not None and executor._frontend.last_beat.busy, "it is in a step")
    os.kill(rank_pid(executor, rank), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"engine rank {rank} was killed by SIGKILL"):
        result.result(DEADLINE_S)
    monkeypatch.delitem(sys.modules, "fellow_spec", raising=False)
