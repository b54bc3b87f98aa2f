"""Runs schedules by number."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Iterable

from msgspec import Struct

from .composition import Simulation
from .violation import Violation

COLLECT_EVERY = 100


class Found(Struct):
    """A schedule that broke a promise."""

    seed: int
    violation: Violation
    lines: list[str]


def run_one(seed: int, *, traced: bool = False) -> Found | None:
    sim = Simulation(seed, traced=traced)
    try:
        sim.run()
    except Violation as violation:
        return Found(seed, violation, sim.lines)
    except Exception as error:
        lines = [*sim.lines, traceback.format_exc()]
        return Found(seed, Violation("I3", f"an exception came out of the product: {error!r}"), lines)
    if traced:
        print("\n".join(sim.lines))
    return None


def run_many(seeds: Iterable[int]) -> Found | None:
    """The first that breaks a promise, run again with a trace."""
    logging.disable(logging.CRITICAL)
    gc.disable()  # each schedule leaves a heap of cycles: it is cheaper to free many at once
    for count, seed in enumerate(seeds):
        if count % COLLECT_EVERY == 0:
            gc.collect()
        if run_one(seed) is not None:
            return run_one(seed, traced=True)
    return None


def measured(seeds: range) -> tuple[Found | None, float, float]:
    """What was found, and the seconds it took: on the wall and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    gc.freeze()
    found = run_many(seeds)
    return found, time.perf_counter() - wall, time.process_time() - cpu
