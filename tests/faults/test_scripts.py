"""What the end of a user's script, its signals, forks and lost references mean for its engine."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import Trace, until
from tllm_core.engines.echo import expected_tokens


def test_a_script_that_just_ends_in_mid_stream_leaves_nothing(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        executor = create(**SLOW)
        result = executor.generate_async([1], LONG)
        next(result)
        """)
    assert run.wait() == 0
    assert run.stderr() == ""
    assert trace.processes() == {}


def test_an_uncaught_exception_ends_script_and_world(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        executor = create(**SLOW)
        result = executor.generate_async([1], LONG)
        next(result)
        threading.Thread(target=lambda: list(result), daemon=True).start()
        1 / 0
        """)
    assert run.wait() == 1
    assert "ZeroDivisionError" in run.stderr()
    assert trace.processes() == {}


def test_a_lost_reference_ends_the_world_while_the_script_lives(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        executor = create()
        say(ready=True)
        del executor
        gc.collect()
        time.sleep(600)
        """)
    run.until("ready")
    until(lambda: set(trace.processes()) == {run.pid}, "the world is gone and the script is not")


def test_an_interrupt_raises_in_the_wait_and_leaves_nothing(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        handler = signal.getsignal(signal.SIGINT)
        with create(**SLOW) as executor:
            result = executor.generate_async([1], LONG)
            next(result)
            try:
                say(waiting=True)
                result.result()
            except KeyboardInterrupt:
                say(interrupted=True, alive=executor.check_health())
        say(same=signal.getsignal(signal.SIGINT) is handler)
        """)
    run.until("waiting")
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 0
    assert run.said["interrupted"]
    assert run.said["alive"]
    assert run.said["same"]
    assert trace.processes() == {}


def test_the_users_own_handlers_run_and_stay_the_same_objects(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        seen = []
        def on_int(number, frame): seen.append(number)
        def on_term(number, frame): sys.exit(7)
        signal.signal(signal.SIGINT, on_int)
        signal.signal(signal.SIGTERM, on_term)
        executor = create(**SLOW)
        result = executor.generate_async([1], LONG)
        next(result)
        say(waiting=True)
        while not seen:
            next(result)
        say(same=signal.getsignal(signal.SIGINT) is on_int and signal.getsignal(signal.SIGTERM) is on_term,
            alive=executor.check_health())
        list(result)
        """)
    run.until("waiting")
    os.killpg(run.pid, signal.SIGINT)
    assert run.until("same")
    assert run.until("alive")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 7
    assert trace.processes() == {}


def test_an_interrupted_shutdown_can_be_called_again(script: Callable[[str], Any], trace: Trace) -> None:
    run = script("""
        executor = create(faults=[{"at": "step", "do": "hang"}])
        result = executor.generate_async([1], LONG)
        while executor._frontend.last_beat is None or not executor._frontend.last_beat.busy:
            time.sleep(0.01)
        try:
            say(ending=True)
            executor.shutdown(600)
        except KeyboardInterrupt:
            say(interrupted=True)
        executor.shutdown(1)
        say(state=executor.health().state)
        """)
    run.until("ending")
    time.sleep(0.5)  # into the wait; before it an interrupt is raised all the same
    os.kill(run.pid, signal.SIGINT)
    assert run.until("interrupted")
    assert run.wait() == 0
    assert run.said["state"] == "closed"
    assert trace.processes() == {}


@pytest.mark.parametrize("phase", ["before ready", "idle", "mid-stream"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_is_killed_takes_its_engine_along(
    script: Callable[[str], Any], trace: Trace, phase: str, number: int
) -> None:
    load = 600 if phase == "before ready" else 0
    run = script(f"""
        executor = create(on_phase=lambda phase: say(phase=phase.name), load_delay_s={load}, world_size=2, **SLOW)
        say(idle=True)
        result = executor.generate_async([1], LONG)
        if {phase == "mid-stream"}:
            next(result)
            say(streaming=True)
        time.sleep(600)
        """)
    run.until({"before ready": "phase", "idle": "idle", "mid-stream": "streaming"}[phase])
    assert len(trace.processes()) == 4
    os.kill(run.pid, number)
    assert run.wait() == -number
    trace.until_gone(5)


def test_a_script_without_a_main_guard_runs_once_with_just_its_own_processes(
    script: Callable[[str], Any], trace: Trace
) -> None:
    run = script("""
        with create(world_size=2) as executor:
            say(tokens=executor.generate([3], SamplingParams(max_tokens=4)).outputs[0].token_ids)
            say(done=True)
            time.sleep(600)
        """)
    assert run.until("tokens") == expected_tokens([3], 4)
    run.until("done")
    commands = sorted(trace.processes().values())
    assert len(commands) == 4, commands
    assert sum("watcher" in command for command in commands) == 1
    assert sum("tllm_core.world rank" in command for command in commands) == 2


def test_a_forked_childs_exit_and_calls_never_touch_the_parents_engine(script: Callable[[str], Any]) -> None:
    run = script("""
        import multiprocessing
        executor = create(**SLOW)
        result = executor.generate_async([1], SamplingParams(max_tokens=60))
        next(result)
        def in_child():
            calls = (executor.stats, lambda: executor.generate_async([1]), lambda: executor.control("ping"))
            for use in (*calls, result.abort, executor.abort_all):
                try:
                    use()
                except ExecutorClosedError:
                    continue
                os._exit(1)
            executor.health(), executor.shutdown()
        if (pid := os.fork()) == 0:
            in_child()
            del result, executor
            gc.collect()
            sys.exit(42)  # with all of its atexit callbacks
        process = multiprocessing.get_context("fork").Process(target=in_child)
        process.start()
        say(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        say(tokens=result.result(60).outputs[0].token_ids, process=process.join() or process.exitcode)
        say(alive=executor.check_health(), running=executor.stats().running)
        """)
    assert run.until("child") == 42, run.stderr()
    assert run.until("tokens") == expected_tokens([1], 60)
    assert run.wait() == 0, run.stderr()
    assert run.said["process"] == 0
    assert (run.said["alive"], run.said["running"]) == (True, 0)
