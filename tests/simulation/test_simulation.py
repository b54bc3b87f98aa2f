"""Schedules by the hundred thousand keep every promise, and each is replayed from its number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .composition import Simulation
from .faults import FAULTS
from .runner import run_one
from .violation import Violation

ROOT = Path(__file__).parents[2]
SCHEDULES = int(os.environ.get("TLLM_SIMULATION_SCHEDULES", "100000"))
LONG_SCHEDULES = int(os.environ.get("TLLM_SIMULATION_LONG", "1500"))
PARTS = 20
"""So many that none comes near the time limit of a test."""
PATIENCE_S = 280.0


def run(seed: int, schedules: int, *more: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--schedules", str(schedules), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def count_of(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    said = re.match(r"(\d+)(?: of \d+)? schedules, \d+ per second", done.stdout)
    assert said is not None, done.stdout
    return int(said[1])


@pytest.mark.parametrize("part", range(PARTS))
def test_short_schedules_keep_every_promise(part: int):
    """TLLM_SIMULATION_SCHEDULES (100,000) in all; the output says how many per second."""
    count = -(-SCHEDULES // PARTS)
    done = run(1_000_000 * (part + 1), count, "--short", "--processes", "2", timeout=PATIENCE_S)
    assert count_of(done) == count


def test_long_schedules_keep_every_promise():
    """TLLM_SIMULATION_LONG (1,500)."""
    done = run(90_000_000, LONG_SCHEDULES, "--processes", "2", timeout=PATIENCE_S)
    assert count_of(done) == LONG_SCHEDULES


def test_the_command_line_reports_its_rate():
    assert count_of(run(0, 30)) == 30


def test_a_trace_is_the_same_each_time():
    first, second = run(7, 1, "--trace"), run(7, 1, "--trace")
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout == second.stdout
    assert "frontend 0 has session" in first.stdout


def test_a_broken_promise_is_reported_with_its_schedule(monkeypatch):
    def break_it(self):
        raise Violation("I1", "on purpose")

    monkeypatch.setattr(Simulation, "_settle", break_it)
    found = run_one(11, traced=True)
    assert found is not None
    assert found.seed == 11
    assert str(found.violation) == "I1: on purpose"
    assert any("engine 1 starts" in line for line in found.lines)


def test_schedules_reach_what_they_are_about():
    """Every fault and every kind of outcome occurs within a few hundred schedules."""
    seen: set[str] = set()
    for seed in range(300):
        sim = Simulation(seed, traced=True)
        sim.run()
        seen.update(re.findall(r"(?:fault: \w+|ended: \w+|verdict: \w+|not taken: \w+)", "\n".join(sim.lines)))
    outcomes = {"length", "abort", "timeout", "error", "EngineDeadError", "ExecutorClosedError", "Expelled"}
    assert {f"ended: {outcome}" for outcome in outcomes} <= seen
    assert {"verdict: EngineDeadError", "verdict: Expelled", "verdict: BrokerLost", "not taken: Overloaded"} <= seen
    assert len([one for one in seen if one.startswith("fault: ")]) == len({fault.__name__ for fault in FAULTS})
