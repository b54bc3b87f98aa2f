"""`tllm worker`: an engine that outlives every frontend, and ends with its own process."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tllm_core.attach import read_attach_file
from tllm_core.engines.echo import expected_tokens
from tllm_core.world.process import wait_gone


def processes_of(path):
    content = read_attach_file(path)
    return (*content.ranks, content.watcher)


def test_worker_says_how_to_attach_and_what_it_says_works(worker_process, tmp_path):
    worker, path = worker_process()
    line = worker.line()
    assert path.stat().st_mode & 0o777 == 0o600
    command = re.search(r"attach with: tllm (.*)\n", line)[1].replace("PROMPT", "1,2,3").split()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tllm_core.cli import main; sys.exit(main())",
            *command,
            "--max-tokens",
            "4",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == expected_tokens([1, 2, 3], 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_worker_ends_in_order_on_a_signal(worker_process, attach_process, socket_directory, number):
    worker, path = worker_process()
    worker.line()
    processes = processes_of(path)
    frontend = attach_process(path)
    frontend.until("tokens")
    os.kill(worker.pid, number)
    assert worker.wait() == 0, worker.stderr
    assert worker.stderr == ""
    words = frontend.until("error")
    assert words["error"] == "EngineDeadError"
    assert words["message"].startswith("the engine was stopped")
    assert frontend.is_exact()
    assert wait_gone(processes, 0.5)
    assert not path.exists()
    assert not list(socket_directory.iterdir())


def test_a_second_signal_ends_a_worker_whose_engine_does_not_end(worker_process, attach_process):
    worker, path = worker_process(faults='[{at = "step", do = "hang", after = 5}]')
    worker.line()
    processes = processes_of(path)
    frontend = attach_process(path)
    frontend.until("tokens")
    os.kill(worker.pid, signal.SIGTERM)
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait() == 0, worker.stderr
    assert wait_gone(processes, 0.5)


def test_an_engine_that_does_not_end_is_killed_and_that_is_told(worker_process):
    worker, path = worker_process(faults='[{at = "close", do = "hang"}]')
    worker.line()
    processes = processes_of(path)
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait() == 0, worker.stderr
    assert worker.stderr == "tllm: the engine did not end in the time that it was given for that, and is killed\n"
    assert wait_gone(processes, 0.5)


def test_worker_fails_with_the_cause_when_its_engine_dies(worker_process):
    worker, path = worker_process()
    worker.line()
    os.kill(read_attach_file(path).ranks[0].pid, signal.SIGKILL)
    assert worker.wait() == 1
    assert "engine rank 0 was killed by SIGKILL" in worker.stderr
    assert "Traceback" not in worker.stderr
    assert not path.exists()


@pytest.mark.parametrize("with_rank", [False, True], ids=["alone", "with its rank"])
def test_worker_ends_with_the_cause_when_its_watcher_is_frozen(worker_process, socket_directory, with_rank):
    worker, path = worker_process()
    worker.line()
    processes = processes_of(path)
    for identity in processes if with_rank else processes[-1:]:
        os.kill(identity.pid, signal.SIGSTOP)
    assert worker.wait(10.0) == 1
    assert "the engine has not been heard of for 1 s" in worker.stderr
    assert "Traceback" not in worker.stderr
    assert wait_gone(processes, 0.5)
    assert not path.exists()
    assert not list(socket_directory.iterdir())


def test_a_killed_worker_takes_its_engine_along_and_attached_streams_end(
    worker_process, attach_process, socket_directory
):
    worker, path = worker_process()
    worker.line()
    processes = processes_of(path)
    frontend = attach_process(path)
    frontend.until("tokens")
    os.kill(worker.pid, signal.SIGKILL)
    words = frontend.until("error")
    assert words["error"] == "EngineDeadError"
    assert words["message"].startswith("the engine's owner is gone")
    assert frontend.is_exact()
    assert wait_gone(processes, 5.0)
    assert not list(socket_directory.iterdir())
    stale = attach_process(path)
    assert "is gone" in stale.until("error")["message"]


def test_a_second_worker_does_not_take_the_file_of_a_running_one(worker_process):
    worker, path = worker_process()
    worker.line()
    content = json.loads(path.read_text())
    second, _ = worker_process()
    assert second.wait() == 2
    assert "belongs to an engine that runs" in second.stderr
    assert json.loads(path.read_text()) == content


def test_a_worker_replaces_the_file_of_one_that_is_gone(worker_process):
    first, path = worker_process()
    first.line()
    processes = processes_of(path)
    first.kill()
    assert wait_gone(processes, 5.0)
    second, _ = worker_process()
    assert "is ready" in second.line()
    assert processes_of(path) != processes


def test_a_worker_that_can_not_start_leaves_no_file(worker_process):
    worker, path = worker_process(faults='[{at = "start", do = "raise"}]')
    assert worker.wait() == 1
    assert "echo fault" in worker.stderr
    assert not path.exists()


def test_an_engine_in_this_process_can_not_be_attached_to(worker_process):
    worker, path = worker_process("--set", "transport.name=inproc", "--set", "launcher.name=inline")
    assert worker.wait() == 2
    assert "nobody can attach" in worker.stderr
    assert not path.exists()
