"""What stands still while an engine starts ends the start with its cause; what only takes long is told."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import Trace, Worlds, until
from tllm_core import SamplingParams

ROLES = {"rank 0": "world rank", "rank 1": "world rank", "watcher": "world watcher"}
CAUSES = {
    "rank 0": "engine rank 0 is stopped (SIGSTOP, or a debugger)",
    "rank 1": "engine rank 1 is stopped (SIGSTOP, or a debugger)",
    "watcher": "the engine's watcher is stopped (SIGSTOP, or a debugger)",
}
LOADING = """
    os.environ["TLLM_LIVENESS__DEAD_AFTER_S"] = "{dead_after_s}"
    create(load_delay_s=600, world_size=2, launcher_options={{"stall_report_s": 0.5}},
        on_phase=lambda phase: say(phase=phase.name))
    """


def pid_of(trace: Trace, who: str) -> int:
    """Once it is there. Ranks are started in order, and so are their pids."""
    number = 1 if who == "rank 1" else 0
    found: list[int] = []

    def is_there() -> bool:
        found[:] = sorted(pid for pid, command in trace.processes().items() if ROLES[who] in command)
        return len(found) > number

    until(is_there, f"{who} is started")
    return found[number]


@pytest.mark.parametrize("moment", ["as soon as it is there", "while weights are loaded"])
@pytest.mark.parametrize("who", CAUSES)
def test_what_is_stopped_ends_the_start(script: Callable[[str], Any], trace: Trace, who: str, moment: str) -> None:
    run = script(LOADING.format(dead_after_s=1.0))
    if moment == "while weights are loaded":
        run.until("phase")
    os.kill(pid_of(trace, who), signal.SIGSTOP)
    since = time.monotonic()
    assert run.wait() == 1
    print(f"{who}: the script ended after {time.monotonic() - since:.2f} s")
    assert f"EngineStartError: {CAUSES[who]}" in run.stderr()
    assert trace.processes() == {}


@pytest.mark.parametrize("who", CAUSES)
def test_a_start_that_stands_still_for_less_than_the_deadline_is_told_with_phase_and_state(
    script: Callable[[str], Any], trace: Trace, who: str
) -> None:
    run = script(LOADING.format(dead_after_s=3600))
    run.until("phase")
    stopped = pid_of(trace, who)
    os.kill(stopped, signal.SIGSTOP)
    state = f"{'its ' if who == 'watcher' else ''}{who} is stopped"

    def is_told() -> bool:
        lines = run.stderr().splitlines()
        return any(
            line.startswith("tllm: still starting: rank ") and "'loading echo weights'" in line and line.endswith(state)
            for line in lines
        )

    until(is_told, f"stderr says that {state}")
    os.kill(stopped, signal.SIGCONT)
    until(lambda: not run.stderr().splitlines()[-1].endswith("stopped"), "it is told that it goes on")
    assert run.popen.poll() is None


def test_a_stop_for_an_instant_ends_nothing(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        with create(load_delay_s=3.0, on_phase=lambda phase: say(phase=phase.name)) as executor:
            say(finished=executor.generate([1], SamplingParams(max_tokens=2)).finished)
        """)
    run.until("phase")
    for who in ("rank 0", "watcher"):
        pid = pid_of(trace, who)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)  # as a profiler does
        os.kill(pid, signal.SIGCONT)
    assert run.until("finished") is True
    assert run.wait() == 0, run.stderr()


def test_an_owner_that_was_frozen_while_it_waits_gives_nobody_up(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        with create(load_delay_s=4.0, on_phase=lambda phase: say(phase=phase.name)) as executor:
            say(finished=executor.generate([1], SamplingParams(max_tokens=2)).finished)
        """)
    run.until("phase")
    everybody = [run.pid, pid_of(trace, "watcher"), pid_of(trace, "rank 0")]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)  # longer than `dead_after_s`
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    assert run.until("finished") is True
    assert run.wait() == 0, run.stderr()


def test_a_load_that_holds_the_interpreters_lock_is_none(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(faults=[{"at": "start", "do": "hold_gil", "seconds": 3.0}])
    assert executor.generate([1], SamplingParams(max_tokens=2)).finished  # type: ignore[union-attr]
