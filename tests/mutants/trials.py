"""Runs cases over mutants: a process that imports everything once, and a fork of it per mutant, several at a time.

Cases that fail often do so by a time limit, and most of a fork's life is waiting.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from tllm_core.conformance.report import Outcome

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 4
LIMIT_S = 240
"""Of one trial, after which its process is killed."""
MODULES = {"transport": "test_transports", "engine": "test_engines", "launcher": "test_launchers"}
TEXT = """
from tests.conformance.{module} import {suite} as Whole

class TestMutant(Whole):
    {attribute}
"""


class Trial(Struct, frozen=True):
    """One class and the case to run over it. reference: of the mutant, "" = the class of ours that the suite is for."""

    kind: str
    suite: str
    case: str
    reference: str = ""

    def __str__(self) -> str:
        return f"{self.suite}-{self.case}"

    @property
    def text(self) -> str:
        """The test file that its author would write."""
        attribute = f"{self.kind} = {self.reference!r}" if self.reference else "pass"
        return TEXT.format(module=MODULES[self.kind], suite=self.suite, attribute=attribute)


class Told(Struct, frozen=True):
    """What came of a trial. broken: why it could not be run."""

    trial: Trial
    outcomes: list[Outcome] = []
    broken: str = ""


class Bench:
    """A process that runs trials; a context manager, whose end leaves none of its processes."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        start = f"import sys; sys.path[:] = {[str(ROOT), *sys.path]!r}; from tests.mutants.trials import main; main()"
        self._told: dict[Trial, Told] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(trials))
        self._process.stdin.close()

    def told(self, trial: Trial) -> Told:
        """Waits for what came of it."""
        assert self._process.stdout is not None
        while trial not in self._told:
            line = self._process.stdout.readline()
            assert line, f"the bench ended before {trial}"
            told = msgspec.json.decode(line, type=Told)
            self._told[told.trial] = told
        return self._told[trial]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# ------------------------------------------------------------------------------------------------ the bench's own process


def main() -> None:
    """Reads trials from stdin, and writes a line for each to stdout as it ends."""
    trials = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Trial])
    _import_all(trials)
    told_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    running: dict[int, tuple[Trial, Path]] = {}

    def wait_for_one() -> None:
        pid, _ = os.wait()
        trial, path = running.pop(pid)
        written = path.read_bytes()
        told_to.write((written or msgspec.json.encode(Told(trial, broken="its process ended without a word"))) + b"\n")
        told_to.flush()

    with tempfile.TemporaryDirectory(prefix="tllm-") as directory:
        for number, trial in enumerate(trials):
            if len(running) >= AT_ONCE:
                wait_for_one()
            path = Path(directory, str(number))
            path.touch()
            if (pid := os.fork()) == 0:
                _run_and_exit(trial, path)
            running[pid] = trial, path
        while running:
            wait_for_one()


def _import_all(trials: Sequence[Trial]) -> None:
    """What each fork would import anew. Not the suites, whose assertions pytest can only make speak when it imports them."""
    for module in ("pytest", "hypothesis.stateful", "tllm_core.executor", "tllm_core.conformance.running"):
        importlib.import_module(module)
    for module in {trial.reference.partition(":")[0] for trial in trials if trial.reference}:
        importlib.import_module(module)


def _run_and_exit(trial: Trial, path: Path) -> NoReturn:
    signal.alarm(LIMIT_S)
    from tllm_core.conformance.running import run_module

    try:
        outcomes = run_module(trial.text, lambda _: None, lambda _: None, trial.case)
        told = Told(trial, outcomes)
    except BaseException as error:
        told = Told(trial, broken=f"{type(error).__name__}: {error}")
    path.write_bytes(msgspec.json.encode(told))
    os._exit(0)  # what a mutant left in this process must not keep it
