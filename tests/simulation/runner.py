"""Runs schedules by number, on one process or on several."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from msgspec import Struct

from .composition import Simulation
from .settings import Profile
from .violation import Violation

COLLECT_EVERY = 50
SLICE = 250


class Found(Struct):
    """A schedule that broke a promise."""

    seed: int
    violation: Violation
    lines: list[str]


class Tally(Struct):
    """How many schedules ran, the first number known to break a promise, and what it took on the wall and of CPU time."""

    schedules: int = 0
    failed: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0


def run_one(seed: int, profile: Profile = "long", *, traced: bool = False) -> Found | None:
    sim = Simulation(seed, profile, traced=traced)
    try:
        sim.run()
    except Violation as violation:
        return Found(seed, violation, sim.lines)
    except Exception as error:
        lines = [*sim.lines, traceback.format_exc()]
        return Found(seed, Violation("I3", f"an exception came out of the product: {error!r}"), lines)
    if traced:
        print("\n".join(sim.lines))
    sim.let_go()
    return None


def run_many(seeds: Iterable[int], profile: Profile = "long") -> Tally:
    """Until the first that breaks a promise."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.disable()  # it is cheaper to look for garbage rarely
    tally, cpu = Tally(), time.process_time()
    for count, seed in enumerate(seeds, 1):
        if count % COLLECT_EVERY == 0:
            gc.collect()
        tally.schedules = count
        if run_one(seed, profile) is not None:
            tally.failed = seed
            break
    tally.cpu_s = time.process_time() - cpu
    return tally


def run_on(processes: int, seeds: range, profile: Profile, seconds: float) -> Tally:
    """Slices of `seeds` on so many processes; no new slice after `seconds`, or once a schedule broke a promise."""
    total, began = Tally(), time.perf_counter()
    slices: Iterator[range] = iter([seeds[at : at + SLICE] for at in range(0, len(seeds), SLICE)])
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        running: set[Future[Tally]] = set()
        while True:
            while len(running) < 2 * processes and total.failed is None and time.perf_counter() - began < seconds:
                part = next(slices, None)
                if part is None:
                    break
                running.add(pool.submit(run_many, part, profile))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                _add(total, future.result())
    total.wall_s = time.perf_counter() - began
    return total


def _add(total: Tally, part: Tally) -> None:
    total.schedules += part.schedules
    total.cpu_s += part.cpu_s
    if part.failed is not None and (total.failed is None or part.failed < total.failed):
        total.failed = part.failed
