import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tllm_core import GenerationExecutor
from tllm_core.engines.echo import expected_tokens
from tllm_core.world.process import wait_gone

SCRIPT = Path(__file__).with_name("attached_frontend.py")
TLLM = "import sys; from tllm_core.cli import main; sys.exit(main())"
LONG = 100_000
"""Tokens of a stream that does not end during a test."""


class Process:
    """A child whose lines are read as they come."""

    def __init__(self, *command, **options):
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        self._lines = queue.SimpleQueue()
        self.stderr = ""
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_stderr)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self):
        return self.popen.pid

    def _read(self):
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_stderr(self):
        self.stderr = self.popen.stderr.read()

    def line(self, timeout=30.0):
        """The next line; None at the end."""
        return self._lines.get(timeout=timeout)

    def kill(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait()

    def wait(self, timeout=30.0):
        code = self.popen.wait(timeout)
        for thread in self._threads:
            thread.join(timeout)
        self.popen.stdout.close()
        self.popen.stderr.close()
        return code


class AttachedProcess(Process):
    """A frontend in a process of its own, and what it has received so far."""

    def __init__(self, path, first=1, max_tokens=LONG, *more):
        super().__init__(sys.executable, str(SCRIPT), str(path), str(first), str(max_tokens), *more)
        self.first = first
        self.tokens = []

    def next(self, timeout=30.0):
        line = self.line(timeout)
        if line is None:
            self.wait()
            raise AssertionError(f"it ended: {self.stderr}")
        words = json.loads(line)
        self.tokens += words.get("tokens", [])
        return words

    def until(self, key, timeout=30.0):
        """The next line that has this key."""
        while key not in (words := self.next(timeout)):
            pass
        return words

    def is_exact(self):
        return self.tokens == expected_tokens([self.first, 2, 3], len(self.tokens))


class Owned:
    """An engine that this process owns, and the file by which others attach to it."""

    def __init__(self, path, executor):
        self.path, self.executor = path, executor
        self.content = executor.write_attach_file(path)

    @property
    def rank0(self):
        return self.content.ranks[0]

    def processes(self):
        return (*self.content.ranks, self.content.watcher)

    def worker_counts(self):
        return self.executor.stats().extra["worker"]

    def requests(self):
        """How many the engine still owes something."""
        return self.worker_counts()["requests"]

    def sessions(self):
        return self.worker_counts()["sessions"]


@pytest.fixture
def until():
    """Waits for a condition, which must come true."""

    def wait(condition, timeout=20.0):
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {timeout} s"
            time.sleep(0.01)
        return value

    return wait


@pytest.fixture
def socket_directory():
    path = tempfile.mkdtemp(prefix="tllm-attach-")  # short, as socket paths have to be
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def config(tmp_path, socket_directory):
    """Writes a config file."""

    def write(protocol="ipc", liveness="", wire="", ranks=1, step_interval_s=0.002, faults="[]"):
        path = tmp_path / "tllm.toml"
        path.write_text(
            f"""
            [engine]
            name = "echo"
            [engine.echo]
            step_interval_s = {step_interval_s}
            max_seq_len = {2 * LONG}
            world_size = {ranks}
            faults = {faults}
            [transport]
            name = "zmq"
            [transport.zmq]
            protocol = "{protocol}"
            directory = "{socket_directory}"
            [liveness]
            {liveness}
            [wire]
            {wire}
            """
        )
        return path

    return write


@pytest.fixture
def own(config, tmp_path):
    """Starts engines; afterwards all their processes are gone."""
    owned = []

    def start(**settings):
        executor = GenerationExecutor.create(config(**settings))
        owned.append(executor)
        return Owned(tmp_path / f"engine-{len(owned)}.json", executor)

    yield start
    for executor in owned:
        executor.shutdown(5.0)
        assert wait_gone(executor._frontend.ranks, 5.0)


@pytest.fixture
def attach_process():
    """Starts frontends in processes of their own."""
    started = []

    def start(path, *arguments):
        process = AttachedProcess(path, *arguments)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.popen.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
        process.kill()


@pytest.fixture
def worker_process(config, tmp_path):
    """Starts `tllm worker`; returns the process and its attach file once it is ready."""
    started = []

    def start(*more, **settings):
        path = tmp_path / "worker.json"
        command = [sys.executable, "-c", TLLM, "worker", "--config", str(config(**settings))]
        process = Process(*command, "--attach-file", str(path), *more, cwd=tmp_path)
        started.append(process)
        return process, path

    yield start
    for process in started:
        process.kill()
