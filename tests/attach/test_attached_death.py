"""The engine's death and freeze, as its owner and attached frontends in processes of their own see it."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest

from tllm_core import EngineDeadError, GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens
from tllm_core.world.process import is_alive, wait_gone

DEAD_AFTER_S = 1.0
GENEROUS_S = 8 * DEAD_AFTER_S


def death_of(process):
    """The error that ends an attached stream, whose tokens up to then are exact."""
    words = process.until("error")
    assert words["error"] == "EngineDeadError", words
    assert process.is_exact()
    return words


def blind(owned, tmp_path):
    """A copy of the attach file for a frontend that can't see the engine's processes, as from another host."""
    copy = tmp_path / "blind.json"
    copy.write_text(json.dumps({**json.loads(owned.path.read_text()), "host": ""}))
    copy.chmod(0o600)
    return copy


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_a_killed_rank_wakes_the_streams_of_owner_and_attached_alike(own, attach_process, tmp_path, protocol):
    owned = own(protocol=protocol, liveness="dead_after_s = 60")  # so that they are told, or not at all
    processes = [attach_process(owned.path, 1), attach_process(blind(owned, tmp_path), 2)]
    result = owned.executor.generate_async([3, 2, 3], SamplingParams(max_tokens=50_000))
    for process in processes:
        process.until("tokens")
    killed_at = time.monotonic()
    os.kill(owned.rank0.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="engine rank 0 was killed by SIGKILL"):
        result.result(20)
    for process in processes:
        words = death_of(process)
        assert words["message"].startswith("engine rank 0 was killed by SIGKILL")
        assert words["at"] - killed_at < 10


def test_any_ranks_death_is_the_engines(own, attach_process):
    owned = own(ranks=3)
    process = attach_process(owned.path)
    process.until("tokens")
    os.kill(owned.content.ranks[2].pid, signal.SIGKILL)
    assert death_of(process)["message"].startswith("engine rank 2 was killed by SIGKILL")
    assert wait_gone(owned.processes(), 10)


def test_a_failing_engine_tells_attached_frontends_its_traceback(own, attach_process):
    owned = own(faults='[{at = "submit", do = "raise", token = 99}]')
    process = attach_process(owned.path)
    process.until("tokens")
    with pytest.raises(EngineDeadError, match="echo fault"):
        owned.executor.generate([99])
    message = death_of(process)["message"]
    assert message.startswith("RuntimeError: echo fault")
    assert "Traceback" in message


def test_a_stopped_rank_is_noticed_and_named(own, attach_process, tmp_path):
    owned = own(ranks=2)
    processes = [attach_process(owned.path, 1), attach_process(blind(owned, tmp_path), 2)]
    for process in processes:
        process.until("tokens")
    stopped_at = time.monotonic()
    os.kill(owned.content.ranks[1].pid, signal.SIGSTOP)
    for process in processes:
        words = death_of(process)
        assert "engine rank 1 is stopped" in words["message"]
        assert words["at"] - stopped_at < GENEROUS_S
    assert wait_gone(owned.processes(), 10)  # the world ends: nobody would use it any more


def test_a_whole_world_that_is_frozen_is_noticed(own, attach_process, tmp_path):
    owned = own()
    processes = [attach_process(owned.path, 1), attach_process(blind(owned, tmp_path), 2)]
    for process in processes:
        process.until("tokens")
    stopped_at = time.monotonic()
    for identity in reversed(owned.processes()):
        os.kill(identity.pid, signal.SIGSTOP)
    for process in processes:
        words = death_of(process)
        assert "has not been heard of for 1 s" in words["message"] or "is stopped" in words["message"]
        assert words["at"] - stopped_at < GENEROUS_S


def test_watcher_and_ranks_killed_together_are_noticed_without_a_word(own, attach_process, tmp_path):
    owned = own()
    seeing, remote = attach_process(owned.path, 1), attach_process(blind(owned, tmp_path), 2)
    seeing.until("tokens"), remote.until("tokens")
    killed_at = time.monotonic()
    for identity in reversed(owned.processes()):
        os.kill(identity.pid, signal.SIGKILL)
    assert "is gone" in death_of(seeing)["message"]
    words = death_of(remote)
    assert "has not been heard of for 1 s" in words["message"]
    assert words["at"] - killed_at < GENEROUS_S


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_watcher_is_what_attached_frontends_hear_of(own, attach_process, signum):
    """Whichever end is noticed first: the ranks go with it."""
    owned = own(liveness="dead_after_s = 60")
    processes = [attach_process(owned.path, first) for first in (1, 2, 3)]
    for process in processes:
        process.until("tokens")
    os.kill(owned.content.watcher.pid, signum)
    assert [death_of(process)["message"] for process in processes] == ["the engine's watcher is gone"] * 3


def test_a_frontend_that_was_frozen_itself_declares_nobody_dead(own, attach_process, until):
    owned = own(liveness="dead_after_s = 0.5")
    process = attach_process(owned.path)
    process.until("tokens")
    for _ in range(3):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: _state(process.pid) == "T")
        time.sleep(1.5)  # three times as long as a silence that counts
        os.kill(process.pid, signal.SIGCONT)
        process.until("tokens")
    before = len(process.tokens)
    until(lambda: process.until("tokens") and len(process.tokens) > before + 200)
    assert process.is_exact()


def test_a_long_pause_of_the_engine_is_no_death(own, attach_process):
    pause = '[{at = "step", do = "hold_gil", seconds = 2.0, after = 20, times = 1}]'
    owned = own(liveness="dead_after_s = 0.5", faults=pause)
    process = attach_process(owned.path, 1, 100)
    result = owned.executor.generate([2, 2, 3], SamplingParams(max_tokens=100))
    assert list(result.outputs[0].token_ids) == expected_tokens([2, 2, 3], 100)
    process.until("done")
    assert process.tokens == expected_tokens([1, 2, 3], 100)


def test_a_killed_rank_leaves_no_file_behind(own, until, socket_directory):
    owned = own()
    assert list(socket_directory.glob("*.sock"))
    os.kill(owned.rank0.pid, signal.SIGKILL)
    until(lambda: not is_alive(owned.content.watcher))
    owned.executor.shutdown()
    assert not list(socket_directory.iterdir())


def test_a_killed_watcher_leaves_no_file_behind(own, socket_directory):
    owned = own()
    os.kill(owned.content.watcher.pid, signal.SIGKILL)
    assert owned.executor.wait_ended(20)
    owned.executor.shutdown()
    assert not list(socket_directory.iterdir())


def test_control_calls_of_an_attached_frontend_fail_at_once_when_the_engine_dies(own):
    owned = own(faults='[{at = "control", do = "hang"}]')
    with GenerationExecutor.attach(owned.path) as attached:
        killer = threading.Timer(0.3, os.kill, (owned.rank0.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            attached.control("ping", timeout=30)
        killer.join()


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("who", ["watcher", "rank 0"])
def test_an_attach_to_a_world_that_stands_still_is_told_who_does(own, who):
    owned = own(liveness="dead_after_s = 0.5\nbroker_down_after_s = 60")
    process = owned.content.watcher if who == "watcher" else owned.rank0
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineDeadError, match=rf"{who} is (stopped|gone)|process \d+"):
            GenerationExecutor.attach(owned.path, timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the watcher ends a rank that stands still
            os.kill(process.pid, signal.SIGCONT)
