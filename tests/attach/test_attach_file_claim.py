"""An attach file is one engine's at a time: whoever comes second is told who has it, before anything is loaded."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tests.attach.conftest import TLLM, Process
from tllm_core import GenerationExecutor, SamplingParams
from tllm_core import claim as claim_module
from tllm_core.attach import claim_attach_file, read_attach_file
from tllm_core.claim import Claim, Held
from tllm_core.contracts.interfaces import Identity
from tllm_core.errors import ConfigError
from tllm_core.world.process import wait_gone

CONTENDER = """
import sys
from tllm_core.attach import claim_attach_file
from tllm_core.errors import ConfigError

print("at the line", flush=True)
for line in sys.stdin:
    try:
        claim = claim_attach_file(line.strip())
    except ConfigError as error:
        print("refused:", error, flush=True)
        continue
    print("has it", flush=True)
    sys.stdin.readline()
    claim.release()
    print("gave it back", flush=True)
"""
ROUNDS = 60
CONTENDERS = 3


@pytest.fixture
def contenders():
    """Processes that claim a file as soon as they are told which, and give it back as soon as they are told to."""
    started = [
        subprocess.Popen([sys.executable, "-c", CONTENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(CONTENDERS)
    ]
    for process in started:
        assert process.stdout.readline() == "at the line\n"
    yield started
    for process in started:
        process.kill()
        process.communicate()


def say(process, text):
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def test_of_several_that_claim_at_once_exactly_one_has_it_and_the_others_name_it(contenders, tmp_path):
    path = tmp_path / "engine.json"
    for _ in range(ROUNDS):
        for process in contenders:
            say(process, path)
        answers = {process.pid: process.stdout.readline() for process in contenders}
        [winner] = [process for process in contenders if answers[process.pid] == "has it\n"]
        refused = [answer for pid, answer in answers.items() if pid != winner.pid]
        assert all(f"(process {winner.pid})" in answer for answer in refused), refused
        say(winner, "give it back")
        assert winner.stdout.readline() == "gave it back\n"
    assert not list(tmp_path.iterdir())


def test_the_claim_of_one_that_was_killed_is_taken_over_whoever_it_names(contenders, tmp_path):
    path = tmp_path / "engine.json"
    say(contenders[0], path)
    assert contenders[0].stdout.readline() == "has it\n"
    contenders[0].kill()
    contenders[0].wait()
    with claim_attach_file(path), pytest.raises(ConfigError, match=rf"\(process {os.getpid()}\)"):
        claim_attach_file(path)
    assert not list(tmp_path.iterdir())


def test_a_forked_child_does_not_keep_its_parents_claim(tmp_path):
    path, (gone, end) = tmp_path / "engine.json", os.pipe()
    claim = Claim(path)
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(gone, 1)
        os._exit(0)
    try:
        claim.release()
        with Claim(path):
            pass
    finally:
        os.close(end)
        os.close(gone)
        assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_is_forked_while_the_parent_dies_does_not_keep_the_claim(tmp_path):
    path = tmp_path / "engine.json"
    script = (
        "import os, sys; from tllm_core.claim import Claim; claim = Claim(sys.argv[1])\n"
        "if os.fork(): os.kill(os.getpid(), 9)\n"
        "print(os.getpid(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        assert process.wait(30) == -signal.SIGKILL
        with Claim(path):
            pass
        process.stdin.close()


def test_a_lock_that_somebody_removed_is_not_taken_from_the_next_one(tmp_path):
    first = Claim(tmp_path / "engine.json")
    next(tmp_path.iterdir()).unlink()
    with Claim(tmp_path / "engine.json"):
        first.release()
        with pytest.raises(Held, match=str(os.getpid())):
            Claim(tmp_path / "engine.json")


def test_a_lock_that_was_given_back_while_another_waited_for_it_is_none(tmp_path, monkeypatch):
    path, holders = tmp_path / "engine.json", [Claim(tmp_path / "engine.json")]

    def late(fd):
        """Between the open and the lock of one, the holder gives it back, and a third one takes it."""
        monkeypatch.setattr("tllm_core.claim.try_lock", flock)
        holders.pop().release()
        holders.append(Claim(path))
        return flock(fd)

    flock = claim_module.try_lock
    monkeypatch.setattr("tllm_core.claim.try_lock", late)
    with pytest.raises(Held):
        Claim(path)
    holders.pop().release()
    assert not list(tmp_path.iterdir())


def test_a_dead_process_is_not_named_though_its_name_still_stands_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tllm_core.claim.WORDS_S", 0.05)
    with (tmp_path / ".engine.json.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(msgspec.json.encode(Identity(-1, os.getpid(), start_time=1)))
        lock.flush()
        with pytest.raises(ConfigError, match="belongs to an engine that runs or starts; stop it"):
            claim_attach_file(tmp_path / "engine.json")


def test_of_two_workers_started_at_once_one_runs_and_the_other_names_it_and_loads_nothing(config, tmp_path):
    path = tmp_path / "worker.json"
    command = [sys.executable, "-c", TLLM, "worker", "--config", str(config()), "--attach-file", str(path)]
    for _ in range(4):
        workers = [Process(*command, cwd=tmp_path) for _ in range(2)]
        try:
            lines = {worker.pid: worker.line() for worker in workers}
            [first] = [worker for worker in workers if lines[worker.pid] is not None]
            [second] = [worker for worker in workers if worker is not first]
            assert "is ready" in lines[first.pid]
            assert second.wait() == 2
            assert re.fullmatch(rf"tllm: the attach file .* \(process {first.pid}\); .*\n", second.stderr)
            with GenerationExecutor.attach(path) as executor:
                executor.generate([1, 2, 3], SamplingParams(max_tokens=4))
            processes = (*read_attach_file(path).ranks, read_attach_file(path).watcher)
            os.kill(first.pid, signal.SIGTERM)
            assert first.wait() == 0
            assert wait_gone(processes, 5.0)
        finally:
            for worker in workers:
                worker.kill()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tllm.toml"]


def test_executors_share_no_file_and_the_next_one_has_it_after_the_end(own, config, tmp_path):
    first = own()
    content = json.loads(first.path.read_text())
    with GenerationExecutor.create(config()) as second:
        with pytest.raises(ConfigError, match=rf"engine that runs or starts \(process {os.getpid()}\)"):
            second.write_attach_file(first.path)
        assert json.loads(first.path.read_text()) == content
        assert first.executor.write_attach_file(first.path) == first.content, "its own may be written anew"
        first.executor.shutdown(5.0)
        assert read_attach_file(first.path).ended_by_owner
        assert second.write_attach_file(first.path) == read_attach_file(first.path)
    assert read_attach_file(first.path).ended_by_owner
    assert not list(tmp_path.glob(".*"))


def test_the_file_of_an_engine_that_died_is_free_though_its_executor_was_not_shut_down(own, config):
    first = own()
    os.kill(first.rank0.pid, signal.SIGKILL)
    assert first.executor.wait_world_ended(10)
    with GenerationExecutor.create(config()) as second:
        assert second.write_attach_file(first.path) == read_attach_file(first.path)
        with pytest.raises(ConfigError, match="belongs to an engine that runs"):
            first.executor.write_attach_file(first.path)
        first.executor.shutdown(5.0)
        assert not read_attach_file(first.path).ended_by_owner


def test_threads_of_one_process_that_claim_at_once_do_not_both_have_it(tmp_path):
    path, claims, refused, start = tmp_path / "engine.json", [], [], threading.Barrier(8)

    def claim():
        start.wait()
        try:
            claims.append(claim_attach_file(path))
        except ConfigError as error:
            refused.append(f"(process {os.getpid()})" in str(error))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == 1
    assert refused == [True] * 7
    claims[0].release()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("", "the path of the attach file is empty; name a file"),
        (".", "is a directory; name a file in it"),
        ("missing/engine.json", "there is no directory missing"),
        ("/proc/engine.json", "can't be claimed"),
        ("a\0b", "has a NUL character"),
    ],
)
def test_a_path_that_no_file_can_be_put_at_is_refused_in_words(where, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(words)):
        claim_attach_file(where)


@pytest.mark.parametrize("where", ["", ".", "missing/engine.json"])
def test_a_worker_says_so_before_it_starts_its_engine(where, config, tmp_path):
    faults = '[{at = "start", do = "raise", message = "it was started"}]'
    command = [sys.executable, "-c", TLLM, "worker", "--config", str(config(faults=faults)), "--attach-file", where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"tllm: the (path of the )?attach file .*\n", done.stderr)


@pytest.mark.parametrize("content", [b"[engine]\nname = 'echo'\n", b"{}", b"[1, 2]", b"\xff", b'{"wire_versions": 1}'])
def test_a_file_that_is_no_attach_file_is_left_alone(content, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="something that is no attach file is there, and is left alone"):
        claim_attach_file(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["fifo", "socket", "link", "link to nothing"])
def test_what_is_no_regular_file_is_left_alone(kind, tmp_path):
    path, other = tmp_path / "there", tmp_path / "other"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(os.fspath(path))
    else:
        path.symlink_to(other)
        if kind == "link":
            other.touch()
    before = path.lstat()
    with pytest.raises(ConfigError, match="something that is no attach file is there, and is left alone"):
        claim_attach_file(path)
    assert os.path.samestat(path.lstat(), before)


def test_an_empty_file_and_an_attach_file_of_any_version_are_replaced(tmp_path):
    path = tmp_path / "engine.json"
    for content in ("", '{"wire_versions": [99, 99], "and": "more"}'):
        path.write_text(content)
        claim_attach_file(path).release()


def test_a_worker_whose_config_is_named_as_its_attach_file_leaves_it_alone(config, tmp_path):
    path = config()
    before = path.read_bytes()
    command = [sys.executable, "-c", TLLM, "worker", "--config", str(path), "--attach-file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, path.read_bytes()) == (2, before)
    assert "something that is no attach file is there" in done.stderr


@pytest.mark.parametrize("generation", [-1, 1 << 64])
def test_a_generation_that_no_engine_has_is_told_in_words(generation, own, tmp_path):
    path = tmp_path / "engine.json"
    content = msgspec.json.decode(msgspec.json.encode(own().executor.write_attach_file(path)))
    content["address"]["generation"] = generation
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"no engine has the generation {generation}"):
        GenerationExecutor.attach(path)


def test_a_full_disk_is_found_out_by_the_claim(tmp_path, monkeypatch):
    import errno

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("tllm_core.claim.os.write", full)
        with pytest.raises(ConfigError, match="can't be claimed: No space left on device"):
            claim_attach_file(tmp_path / "engine.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"wire_versions": [99, 1]}', "its lowest wire version, 99, is above its highest, 1"),
        ('{"more": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "is no attach file: Expected `object`"),
    ],
)
def test_a_file_that_is_none_is_told_in_words(content, words, tmp_path):
    path = tmp_path / "engine.json"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_attach_file(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/", "is a directory"),
        ("/proc/self/mem", "can't be read"),
        ("a\0b", "can't be read: embedded null"),
        ("", "no attach file"),
    ],
)
def test_a_path_that_is_no_file_is_told_in_words_and_leaves_no_descriptor(path, words):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError, match=words):
            GenerationExecutor.attach(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_claim_is_beside_the_file_and_is_private(tmp_path):
    with claim_attach_file(tmp_path / "engine.json"):
        [lock] = [Path(entry) for entry in tmp_path.iterdir()]
        assert lock.name == ".engine.json.lock"
        assert lock.stat().st_mode & 0o777 == 0o600
