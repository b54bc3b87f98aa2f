"""`[frontends]`: several processes behind one engine by one line of a config file."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.attach.conftest import TLLM, Process
from tllm_core.engines.echo import expected_tokens
from tllm_core.world.process import identify, wait_gone

APP = """
import os, sys, time
from tllm_core import SamplingParams

def say(*words):
    print(*words, flush=True)

def once(executor):
    result = executor.generate([1, 2, 3], SamplingParams(max_tokens=5))
    say("answer", executor.health().ranks[0].pid, os.getpid(), *result.outputs[0].token_ids)

async def in_a_loop(executor):
    result = await executor.generate_async([1, 2, 3], SamplingParams(max_tokens=5))
    say("answer", executor.health().ranks[0].pid, os.getpid(), *result.outputs[0].token_ids)

def serve(executor):
    for update in executor.generate_async([1, 2, 3], SamplingParams(max_tokens=90_000)):
        say("tokens", os.getpid(), len(update.outputs[0].token_ids))

def fails(executor):
    raise RuntimeError("no more")
"""


@pytest.fixture
def worker(config, tmp_path):
    (tmp_path / "my_app.py").write_text(APP)
    started = []

    def start(run, count, *more, **settings):
        path = config(**settings)
        path.write_text(f'frontends = {{ run = "my_app:{run}", count = {count} }}\n' + path.read_text())
        process = Process(sys.executable, "-c", TLLM, "worker", "--config", str(path), *more, cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def lines(process, word, count):
    """That many lines with this first word, each of another process where they name one."""
    found = []
    while len(found) < count:
        line = process.line()
        assert line is not None, (process.wait(), process.stderr)
        if line.split()[0] == word and not any(line.split()[1] == other[1] for other in found if word == "tokens"):
            found.append(line.split())
    return found


@pytest.mark.parametrize("run", ["once", "in_a_loop"])
def test_each_process_is_served_by_the_one_engine_and_the_worker_ends_with_the_last(worker, run, socket_directory):
    process = worker(run, 3)
    answers = lines(process, "answer", 3)
    assert process.wait(60) == 0, process.stderr
    assert len({answer[1] for answer in answers}) == 1, "one engine"
    assert len({answer[2] for answer in answers}) == 3, "three frontends"
    assert all([int(word) for word in answer[3:]] == expected_tokens([1, 2, 3], 5) for answer in answers)
    assert not list(socket_directory.iterdir())


def test_the_death_of_one_is_told_and_touches_no_other(worker):
    process = worker("serve", 2)
    first, second = (int(words[1]) for words in lines(process, "tokens", 2))
    os.kill(first, signal.SIGKILL)
    deadline, seen = time.monotonic() + 30, 0
    while seen < 20:
        assert time.monotonic() < deadline
        seen += process.line().split()[1] == str(second)
    remaining = identify(0, second)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert f"(process {first}) was killed by SIGKILL" in process.stderr
    assert wait_gone([remaining], 5)


def test_a_killed_worker_takes_its_frontends_along(worker):
    process = worker("serve", 2)
    frontends = [identify(0, int(words[1])) for words in lines(process, "tokens", 2)]
    os.kill(process.pid, signal.SIGKILL)
    assert wait_gone(frontends, 10)


def test_what_a_killed_worker_has_left_goes_with_the_next_one_and_what_a_living_one_has_stays(
    worker, tmp_path, monkeypatch
):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    killed, living = worker("serve", 1), worker("serve", 1)
    for process in (killed, living):
        lines(process, "tokens", 1)
    assert len(list(place.glob("tllm-worker-*/engine.json"))) == 2
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    last = worker("once", 1)
    assert last.wait(60) == 0, last.stderr
    assert len(list(place.glob("tllm-worker-*"))) == len(list(place.glob("tllm-worker-*/engine.json"))) == 1
    lines(living, "tokens", 1)
    os.kill(living.pid, signal.SIGTERM)
    assert living.wait(60) == 0, living.stderr
    assert list(place.glob("tllm-worker-*")) == []


def test_those_that_fail_are_told_and_make_the_worker_fail(worker):
    process = worker("fails", 2)
    assert process.wait(60) == 1
    assert process.stderr.count("RuntimeError: no more") == 2
    assert process.stderr.count("exited with code 1") == 2


def test_the_death_of_the_engine_ends_them_with_its_cause(worker):
    process = worker("serve", 2, faults='[{at = "step", do = "exit", after = 30}]')
    assert process.wait(60) == 1
    assert "engine rank 0 exited with code 3" in process.stderr


@pytest.mark.parametrize(
    ("run", "words"),
    [("nothing_here", "my_app has no function 'nothing_here'"), ("two words", 'must be "module:function"')],
)
def test_a_function_that_is_not_there_is_named(worker, run, words):
    process = worker(run, 1, faults='[{at = "start", do = "raise", message = "the engine was started"}]')
    assert process.wait(60) == 2
    assert words in process.stderr
    assert len(process.stderr.splitlines()) == 1, "before the engine is started"
    assert "Traceback" not in process.stderr


def test_a_module_that_fails_is_told_before_the_engine_is_started(worker, tmp_path):
    (tmp_path / "broken_app.py").write_text("raise RuntimeError('no such luck')")
    path = ("--set", "frontends.run=broken_app:serve")
    process = worker("serve", 1, *path, faults='[{at = "start", do = "raise", message = "the engine was started"}]')
    assert process.wait(60) == 2
    assert "frontends.run: broken_app:serve can't be imported" in process.stderr
    assert "RuntimeError: no such luck" in process.stderr
    assert "the engine was started" not in process.stderr


def test_without_a_file_and_without_frontends_it_says_what_to_give(config, tmp_path):
    process = Process(sys.executable, "-c", TLLM, "worker", "--config", str(config()), cwd=Path(tmp_path))
    assert process.wait(60) == 2
    assert "give --attach-file FILE" in process.stderr
