"""An engine that has work and does not get on with it is told by health, with its stacks; what is only slow is not."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds, until
from tllm_core import ControlError, EngineDeadError, GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens

HUNG = r"engine rank \d has work and made no step and used no CPU time for \d+\.\d s"
SOON = {"liveness.hang_after_s": 1.0}
ENDED = SOON | {"liveness.end_hung": True}
SLOW_S = 3.0
"""Longer than `hang_after_s`, by far."""


def fault(do: str, seconds: float, at: str = "step") -> dict[str, Any]:
    return {"at": at, "do": do, "seconds": seconds, "after": 2 if at == "step" else 0, "times": 1}


def test_a_hang_is_told_while_it_lasts_and_the_engine_lives_on(spawned: Worlds) -> None:
    executor = spawned(faults=[fault("hang", 4.0)], settings=SOON, **SLOW)
    until(lambda: executor.health().last_step_age_s is None, "it has nothing to do")
    result = executor.generate_async([5], SamplingParams(max_tokens=12))
    until(lambda: executor.health().hung is not None, "health tells the hang")
    health = executor.health()
    assert health.hung is not None
    assert re.fullmatch(HUNG, health.hung)
    assert (health.state, health.cause, health.ok, health.reason) == ("ready", None, False, health.hung)
    assert health.last_step_age_s is not None
    assert health.last_step_age_s >= 0.8
    assert [rank.state for rank in health.ranks] == ["running"]
    assert not executor.check_health()
    assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([5], 12)
    until(executor.check_health, "health recovers")
    assert executor.health().reason is None
    assert executor.generate([6], SamplingParams(max_tokens=2))


STACKS = """
    import re
    from tllm_core.config import load_settings

    def hung_world(**more):
        keys = {"engine.name": "echo", "engine.options": {"faults": FAULTS, **more}, "liveness.hang_after_s": 1.0, **SETTINGS}
        return GenerationExecutor.create(load_settings(None, overrides=keys))
"""


def logged(script: Callable[[str], Any], body: str, faults: list[dict[str, Any]], **settings: Any) -> str:
    """Runs a script whose engine has these faults, to its end; what came on its stderr."""
    owner = script(f"{STACKS}\n    FAULTS = {faults!r}\n    SETTINGS = {settings!r}\n{body}")
    assert owner.wait() == 0, owner.stderr()
    return str(owner.stderr())


def test_each_hang_is_logged_once_with_the_stacks_of_all_ranks(script: Callable[[str], Any]) -> None:
    """Two hangs of one engine, with progress in between."""
    faults = [fault("hang", 3.5) | {"times": 1}, fault("hang", 3.5) | {"after": 6, "times": 1}]
    body = """
    with hung_world(world_size=2, step_interval_s=0.02) as executor:
        executor.generate([1], SamplingParams(max_tokens=30))
    """
    words = logged(script, body, faults)
    assert len(re.findall(rf"^tllm: {HUNG}; what its threads are doing:$", words, re.M)) == 2
    assert len(re.findall(r"^tllm: the engine goes on$", words, re.M)) == 2
    first = words.partition("tllm: the engine goes on")[0]
    rank_0, _, rank_1 = first.partition("tllm: the stacks of engine rank 1")
    assert rank_0.count("tllm: the stacks of engine rank 0 (process ") == 1
    assert re.search(r"^(Current t|T)hread 0x\w+ \(most recent call first\):\n", rank_0, re.M)
    assert "faults.py" in rank_0.partition("the stacks of engine rank 0")[2], "where it is blocked"
    assert " in strike\n" in rank_0
    assert " in step\n" in rank_0
    assert " in follow\n" in rank_1


def test_a_hang_that_holds_the_interpreters_lock_tells_its_stacks_too(script: Callable[[str], Any]) -> None:
    """With the lock held in C code no thread of the rank can run Python; the rest of the C call's sleep is cut short."""
    body = """
    with hung_world(step_interval_s=0.02) as executor:
        executor.generate([1], SamplingParams(max_tokens=10))
    """
    words = logged(script, body, [fault("hold_gil", 30)])
    assert " in _hold_gil\n" in words


def test_a_hung_engine_is_ended_after_its_stacks_were_told(script: Callable[[str], Any]) -> None:
    """With `end_hung`; the cause that the caller gets holds them as well."""
    body = """
    with hung_world(step_interval_s=0.02) as executor:
        try:
            executor.generate([1], LONG)
        except EngineDeadError as error:
            say(error=str(error), rank=error.root_cause.rank, state=executor.health().state)
    """
    owner = script(
        f"{STACKS}\n    FAULTS = {[fault('hang', 600)]!r}\n    SETTINGS = {{'liveness.end_hung': True}}\n{body}"
    )
    error = owner.until("error")
    assert re.match(HUNG, error)
    assert "faults.py" in error
    assert (owner.said["rank"], owner.said["state"]) == (0, "dead")
    assert owner.wait() == 0
    assert " in strike\n" in owner.stderr()


def test_a_handler_that_an_engine_installs_is_left_alone(script: Callable[[str], Any]) -> None:
    """The signal's number is documented; who wants it has it, and loses the stacks."""
    owner = script("""
        import tllm_core.world.stacks as stacks
        calls = []
        stacks.answer_with_stacks()
        signal.signal(stacks.STACKS_SIGNAL, lambda number, frame: calls.append(number))
        signal.raise_signal(stacks.STACKS_SIGNAL)
        say(calls=calls)
        """)
    assert owner.until("calls") == [int(signal.SIGURG)]
    assert owner.wait() == 0
    assert "Thread 0x" not in owner.stderr()


def never_hung(executor: GenerationExecutor, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        health = executor.health()
        assert health.hung is None
        assert health.ok, health.reason
        time.sleep(0.05)


@pytest.mark.parametrize(("do", "at"), [("spin", "step"), ("spin", "submit"), ("wait_for_child", "step")])
def test_an_engine_that_computes_is_not_hung(spawned_ipc: Worlds, do: str, at: str) -> None:
    """A long prefill, or a compiler at work, here or in a process of its own: CPU time is used, and no step made."""
    executor = spawned_ipc(faults=[fault(do, SLOW_S, at)], settings=ENDED, **SLOW)
    result = executor.generate_async([5], SamplingParams(max_tokens=12))
    never_hung(executor, SLOW_S)
    assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([5], 12)


def test_a_paused_engine_is_not_hung_and_one_that_was_resumed_is_judged_again(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(faults=[fault("hang", 600)], settings=ENDED, **SLOW)
    executor.control("pause")
    result = executor.generate_async([5], LONG)
    never_hung(executor, SLOW_S)
    executor.control("resume")
    with pytest.raises(EngineDeadError, match=HUNG):
        result.result(DEADLINE_S)


def test_a_long_control_call_is_not_hung_within_its_callers_deadline(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(settings=ENDED, **SLOW)
    result = executor.generate_async([5], SamplingParams(max_tokens=12))
    assert executor.control("sleep_for", SLOW_S, timeout=DEADLINE_S) == [None]
    assert executor.control("sleep_for", SLOW_S, timeout=None) == [None]
    assert executor.check_health()
    assert result.result(DEADLINE_S).outputs[0].token_ids == expected_tokens([5], 12)


def test_a_control_call_that_outlasts_its_deadline_is_hung(spawned_ipc: Worlds) -> None:
    """Without any request: an engine that does not come back takes none either."""
    executor = spawned_ipc(settings=ENDED)
    with pytest.raises(ControlError, match="did not answer"):
        executor.control("sleep_for", 600.0, timeout=0.5)
    with pytest.raises(EngineDeadError, match=HUNG):
        executor.control("ping", timeout=DEADLINE_S)


def test_an_engine_that_hangs_in_its_first_submit_is_hung(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(faults=[fault("hang", 600, at="submit")], settings=ENDED)
    with pytest.raises(EngineDeadError, match=HUNG):
        executor.generate([1], LONG)


SLEEPY = """
from msgspec import Struct
from tllm_core.contracts.interfaces import Engine, EngineSpec
from tllm_core.contracts.messages import EngineInfo, Step

class Settings(Struct):
    pass

SPEC = EngineSpec(name="sleepy", settings_type=Settings, load="sleepy_engine:Sleepy")

class Sleepy(Engine):
    def start(self, context): return EngineInfo(model="sleepy")
    def submit(self, request): pass
    def abort(self, request_id): pass
    def step(self): return Step((), False)
"""


def test_an_engine_that_never_asks_to_be_woken_is_hung_whoever_asks_for_its_stats(
    spawned_ipc: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with a thread of its own, which has died: its loop answers, and does not get on."""
    (tmp_path / "sleepy_engine.py").write_text(SLEEPY)
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = spawned_ipc("sleepy_engine:SPEC", settings=SOON)
    result = executor.generate_async([1], LONG)

    def hung() -> bool:
        assert executor.stats().steps == 0
        time.sleep(0.1)
        return executor.health().hung is not None

    until(hung, "the hang is told")
    result.abort()
    until(executor.check_health, "without work there is no hang")


def test_an_attached_frontend_hears_of_a_hang_and_of_its_end(spawned: Worlds, tmp_path: Path) -> None:
    owner = spawned(faults=[fault("hang", 600)], settings=ENDED | {"liveness.hang_after_s": 2.0}, **SLOW)
    owner.write_attach_file(tmp_path / "engine.json")
    other = GenerationExecutor.attach(tmp_path / "engine.json")
    try:
        result = other.generate_async([1], LONG)
        ages: list[float] = []
        until(
            lambda: bool(ages.append(other.health().last_step_age_s or 0.0) or max(ages) > 0.5),
            "the step's age is seen",
        )
        with pytest.raises(EngineDeadError, match=HUNG) as caught:
            result.result(DEADLINE_S)
        assert " in strike\n" in str(caught.value)
        assert (other.health().state, owner.health().state) == ("dead", "dead")
    finally:
        other.shutdown(20)


def test_a_model_that_loads_is_not_hung(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(load_delay_s=SLOW_S, settings=ENDED)
    assert executor.check_health()


def test_a_rank_that_is_stopped_is_a_freeze_and_no_hang(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(settings=ENDED, **SLOW)
    result = executor.generate_async([1], LONG)
    next(result)
    os.kill(executor.health().ranks[0].pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="engine rank 0 is stopped"):
        result.result(DEADLINE_S)
    assert executor.health().hung is None
