"""Executors over real worlds, user scripts in processes of their own, and what all tests here promise: nothing is left."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.config import load_settings

MARK = "TLLM_FAULT_TEST"
PAIRS = {
    "inproc-inline": ("inproc", "inline", {}),
    "zmq-ipc": ("zmq", "spawn", {}),
    "zmq-tcp": ("zmq", "spawn", {"protocol": "tcp"}),
}
LONG = SamplingParams(max_tokens=4000)
SLOW = {"step_interval_s": 0.02}
DEADLINE_S = 60.0
"""How long anything may take that is promised within a second: tests say that it comes, the measured times how fast."""


def until(condition: Callable[[], bool], what: str, timeout: float = DEADLINE_S) -> None:
    deadline, tick = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true within {timeout} s: {what}")
        tick.wait(0.01)


def marked(mark: str) -> dict[int, str]:
    """pid -> command line of all processes that inherited this mark, zombies aside."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ProcessLookupError):
                continue
    return found


def threads_of_ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tllm-")}


class Trace:
    """What a test's worlds leave in the system: processes by an inherited mark, sockets by a directory of their own."""

    def __init__(self, mark: str, directory: Path) -> None:
        self.mark, self.directory = mark, directory
        self._threads = threads_of_ours()
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._shm = set(os.listdir("/dev/shm"))

    def processes(self) -> dict[int, str]:
        return marked(self.mark)

    def files(self) -> list[str]:
        return [path.name for path in self.directory.rglob("*") if not path.is_dir()]

    def until_gone(self, timeout: float = 30.0) -> None:
        until(lambda: not self.processes(), f"no process survives: {self.processes()}", timeout)

    def check(self) -> None:
        self.until_gone()
        until(lambda: threads_of_ours() <= self._threads, f"no thread survives: {threads_of_ours()}", 10)
        until(lambda: len(os.listdir("/proc/self/fd")) <= self._descriptors, "no descriptor survives", 10)
        assert self.files() == []
        assert [name for name in set(os.listdir("/dev/shm")) - self._shm if "tllm" in name.lower()] == []


@pytest.fixture(autouse=True)
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """After every test: no process, thread, descriptor, socket file or shared memory of its worlds is left."""
    mark = uuid.uuid4().hex
    directory = Path(tempfile.mkdtemp(prefix="tllm-"))  # pytest's own paths are too long for a socket
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    asyncio.new_event_loop().close()  # what the first loop opens for good is not a leak
    trace = Trace(mark, directory)
    try:
        yield trace
        trace.check()
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory)


class Worlds:
    """Starts executors over one pair of transport and launcher."""

    def __init__(self, pair: str, trace: Trace) -> None:
        self.pair, self._trace = pair, trace
        self.started: list[GenerationExecutor] = []

    def __call__(
        self,
        engine: str = "echo",
        *,
        settings: Mapping[str, Any] | None = None,
        launcher_options: Mapping[str, Any] | None = None,
        **engine_options: Any,
    ) -> GenerationExecutor:
        """`settings`: dotted keys such as "liveness.dead_after_s"."""
        transport, launcher, options = PAIRS[self.pair]
        overrides = {
            "engine.name": engine,
            "engine.options": engine_options,
            "transport.name": transport,
            "transport.options": dict(options),
            "launcher.name": launcher,
            "launcher.options": dict(launcher_options or {}),
            **(settings or {}),
        }
        executor = GenerationExecutor.create(load_settings(None, overrides=overrides))
        self.started.append(executor)
        return executor

    def close(self) -> None:
        for executor in self.started:
            executor.shutdown(20)


@pytest.fixture(params=[name for name in PAIRS if name != "inproc-inline"])
def spawned(request: pytest.FixtureRequest, trace: Trace) -> Iterator[Worlds]:
    """Worlds in processes of their own."""
    yield from _worlds(request.param, trace)


@pytest.fixture
def spawned_ipc(trace: Trace) -> Iterator[Worlds]:
    """The same over ipc alone, where the transport makes no difference to the promise."""
    yield from _worlds("zmq-ipc", trace)


@pytest.fixture(params=PAIRS)
def anywhere(request: pytest.FixtureRequest, trace: Trace) -> Iterator[Worlds]:
    """Worlds over every pair."""
    yield from _worlds(request.param, trace)


def _worlds(pair: str, trace: Trace) -> Iterator[Worlds]:
    worlds = Worlds(pair, trace)
    try:
        yield worlds
    finally:
        worlds.close()


PRELUDE = """
import asyncio, gc, json, os, signal, sys, threading, time
from tllm_core import *

def say(**words):
    print(json.dumps(words), flush=True)

def create(on_phase=None, launcher_options=None, **options):
    return GenerationExecutor.create(
        engine="echo", engine_options=options, launcher_options=launcher_options, on_phase=on_phase)

LONG = SamplingParams(max_tokens=4000)
SLOW = {"step_interval_s": 0.02}
say(running=os.getpid())
"""


class Script:
    """A user's script, without a main guard, in a process group of its own. `said`: what it printed, by key."""

    def __init__(self, path: Path, body: str) -> None:
        path.write_text(PRELUDE + textwrap.dedent(body))
        self._errors = path.with_suffix(".err").open("w+")
        self.popen = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=self._errors, text=True, process_group=0
        )
        self.said: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self.popen.pid

    def until(self, key: str) -> Any:
        assert self.popen.stdout is not None
        while key not in self.said:
            line = self.popen.stdout.readline()
            assert line, f"the script ended after {self.said}: {self.stderr()}"
            words = json.loads(line)
            assert "running" not in words or "running" not in self.said, "the script ran twice"
            self.said.update(words)
        return self.said[key]

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Its exit code; all that it still says is read."""
        code = self.popen.wait(timeout)
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.said.update(json.loads(line))
        return code

    def stderr(self) -> str:
        self._errors.flush()
        return Path(self._errors.name).read_text()

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._errors.close()


@pytest.fixture
def script(tmp_path: Path, trace: Trace) -> Iterator[Callable[[str], Script]]:
    """Runs user scripts."""
    scripts: list[Script] = []

    def run(body: str) -> Script:
        scripts.append(Script(tmp_path / f"user_script_{len(scripts)}.py", body))
        return scripts[-1]

    yield run
    for started in scripts:
        started.close()
