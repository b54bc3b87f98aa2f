"""What stands still is noticed, and what is only busy is not taken for dead."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds, until
from tllm_core import EngineDeadError, GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens

BUSY_S = 3.0
"""Longer than `dead_after_s`, by far."""


def freeze(executor: GenerationExecutor, who: str) -> None:
    """Stops rank 0, rank 1, or the whole world with its watcher."""
    ranks = [rank.pid for rank in executor.health().ranks]
    watcher: Any = executor.describe()["world"]
    chosen = {"rank 0": ranks[:1], "rank 1": ranks[1:], "world": [watcher["watcher"], *ranks]}[who]
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Two processes that burn all the CPU time they get."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "world"])
def test_what_is_stopped_is_noticed_and_every_stream_told(spawned: Worlds, who: str) -> None:
    executor = spawned(world_size=2, **SLOW)
    results = [executor.generate_async([i], LONG) for i in range(1, 17)]
    for result in results:
        next(result)
    freeze(executor, who)
    since = time.monotonic()
    words = "not been heard of for 1 s" if who == "world" else f"engine {who} is stopped"
    for i, result in enumerate(results, 1):
        with pytest.raises(EngineDeadError, match=words):
            result.result(DEADLINE_S)
        tokens = result.outputs[0].token_ids
        assert tokens == expected_tokens([i], len(tokens))
    print(f"{who}: noticed after {time.monotonic() - since:.2f} s")
    assert executor.health().state == "dead"
    with pytest.raises(EngineDeadError, match=words):
        executor.generate_async([1])


def test_a_pending_control_call_hears_of_a_freeze(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc()
    freeze(executor, "rank 0")
    with pytest.raises(EngineDeadError, match="engine rank 0 is stopped"):
        executor.control("ping", timeout=DEADLINE_S)


@pytest.mark.parametrize("load", [False, True], ids=["quiet", "both cores busy"])
def test_a_slow_start_a_held_lock_and_a_long_step_are_no_death(spawned_ipc: Worlds, load: bool) -> None:
    held = {"at": "step", "do": "hold_gil", "seconds": BUSY_S, "after": 2, "times": 1}
    hang = {"at": "step", "do": "hang", "seconds": BUSY_S, "after": 4, "times": 1}
    if not load:
        _answers_all_the_same(spawned_ipc, [held])
        return
    with busy_cores():
        _answers_all_the_same(spawned_ipc, [held, hang], load_delay_s=BUSY_S)


def _answers_all_the_same(worlds: Worlds, faults: list[dict[str, Any]], load_delay_s: float = 0) -> None:
    executor = worlds(load_delay_s=load_delay_s, faults=faults, settings={"liveness.dead_after_s": 1.0}, **SLOW)
    result = executor.generate_async([5], SamplingParams(max_tokens=12)).result(DEADLINE_S)
    assert result.outputs[0].token_ids == expected_tokens([5], 12)
    assert executor.check_health()


def test_a_hung_engine_is_ended_where_that_is_configured_and_only_there(spawned_ipc: Worlds) -> None:
    hang = [{"at": "step", "do": "hang", "after": 2, "seconds": 600}]
    settings = {"liveness.hang_after_s": 1.0, "liveness.end_hung": True}
    executor = spawned_ipc(faults=hang, settings=settings, **SLOW)
    with pytest.raises(EngineDeadError, match=r"engine rank 0 has work and made no step .* for 1\.\d s"):
        executor.generate_async([1], LONG).result(DEADLINE_S)


def test_an_engine_without_work_is_never_hung(spawned_ipc: Worlds) -> None:
    settings = {"liveness.hang_after_s": 0.5, "liveness.end_hung": True}
    executor = spawned_ipc(settings=settings, **SLOW)
    executor.generate([1], SamplingParams(max_tokens=2))
    assert not executor.wait_ended(2.0)
    assert executor.generate([1], SamplingParams(max_tokens=2))


def test_a_frontend_that_was_frozen_itself_declares_nobody_dead(script: Callable[[str], Any]) -> None:
    owner = script("""
        with create(**SLOW) as executor:
            result = executor.generate_async([5], SamplingParams(max_tokens=120))
            next(result)
            say(streaming=True)
            say(tokens=result.result(60).outputs[0].token_ids)
            say(state=executor.health().state, sum=executor.generate([6], SamplingParams(max_tokens=1)).finished)
        """)
    owner.until("streaming")
    os.kill(owner.pid, signal.SIGSTOP)
    time.sleep(BUSY_S)
    os.kill(owner.pid, signal.SIGCONT)
    assert owner.until("tokens") == expected_tokens([5], 120)
    assert owner.until("state") == "ready"
    assert owner.wait() == 0


def test_a_thawed_old_generation_changes_nothing(spawned: Worlds) -> None:
    old = spawned(**SLOW)
    result = old.generate_async([1], LONG)
    next(result)
    freeze(old, "world")
    with pytest.raises(EngineDeadError, match="not been heard of"):
        result.result(DEADLINE_S)
    tokens = list(result.outputs[0].token_ids)
    new = spawned(**SLOW)
    stream = new.generate_async([2], SamplingParams(max_tokens=40))
    next(stream)
    for pid in (old.health().ranks[0].pid, old.describe()["world"]["watcher"]):  # type: ignore[call-overload,index]
        os.kill(pid, signal.SIGCONT)
    assert stream.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([2], 40)
    with pytest.raises(EngineDeadError, match="not been heard of"):
        result.result(0)
    assert result.outputs[0].token_ids == tokens
    assert old.health().state == "dead"
    until(lambda: new.stats().running == 0, "the new engine runs nothing")
    assert new.check_health()
