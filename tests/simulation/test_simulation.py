"""Schedules by the thousand keep every promise, and each is replayed from its number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from .composition import Simulation
from .runner import run_one
from .violation import Violation

ROOT = Path(__file__).parents[2]
PROCESSES = 2
BUDGET_S = float(os.environ.get("TLLM_SIMULATION_S", "60"))
SLICE = 100


def command(seed: int, schedules: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--schedules", str(schedules), *more]


def run(seed: int, schedules: int, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(seed, schedules, *more), cwd=ROOT, capture_output=True, text=True, timeout=250)


def test_schedules_keep_every_promise():
    """As many as fit in TLLM_SIMULATION_S seconds (60), on two processes; at least a few hundred on any machine."""
    until, seed, output = time.monotonic() + BUDGET_S, 1_000_000, ""
    rate_per_process = 20.0
    while (left := until - time.monotonic()) > 0 or seed < 1_000_000 + PROCESSES * SLICE:
        share = max(SLICE, int(rate_per_process * min(max(left, 0.0), 20.0)))
        began = time.monotonic()
        workers = [
            subprocess.Popen(command(seed + i * share, share), cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for i in range(PROCESSES)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * PROCESSES, "\n".join(outputs)
        seed += PROCESSES * share
        rate_per_process = share / (time.monotonic() - began)
        output = outputs[0]
    print(f"{seed - 1_000_000} schedules; the last slice: {output}")


def test_the_command_line_reports_its_rate():
    done = run(0, 30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"30 schedules, \d+ per second", done.stdout)


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
    assert len([one for one in seen if one.startswith("fault: ")]) == 15
