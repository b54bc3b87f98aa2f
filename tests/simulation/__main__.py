"""`python -m tests.simulation --seed N --schedules M [--short] [--trace]`: schedules N to N + M - 1.

Exits with 1 if one breaks a promise, after its trace.
"""

from __future__ import annotations

import argparse
import logging
import sys

from .runner import Found, Tally, run_on, run_one
from .settings import Profile


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first schedule's number")
    parser.add_argument("--schedules", type=int, default=1000, help="how many schedules")
    parser.add_argument("--short", action="store_true", help="small schedules, some hundred per second")
    parser.add_argument("--processes", type=int, default=1, help="on how many processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    parser.add_argument("--trace", action="store_true", help="print what happens in each")
    return parser.parse_args()


def report(tally: Tally, wanted: int) -> None:
    count = f"{tally.schedules}" if tally.schedules == wanted else f"{tally.schedules} of {wanted}"
    rate, cpu_rate = tally.schedules / tally.wall_s, tally.schedules / max(tally.cpu_s, 1e-9)
    print(f"{count} schedules, {rate:.0f} per second ({cpu_rate:.0f} per second of CPU time)")


def trace(seeds: range, profile: Profile) -> Found | None:
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        found = run_one(seed, profile, traced=True)
        if found is not None:
            return found
    return None


def main() -> int:
    options = parse()
    profile: Profile = "short" if options.short else "long"
    seeds = range(options.seed, options.seed + options.schedules)
    if options.trace:
        found = trace(seeds, profile)
    else:
        tally = run_on(options.processes, seeds, profile, options.seconds)
        report(tally, options.schedules)
        found = None if tally.failed is None else trace(range(tally.failed, tally.failed + 1), profile)
    if found is None:
        return 0
    print("\n".join(found.lines))
    print(f"schedule {found.seed}: {found.violation}")
    short = " --short" if options.short else ""
    print(f"replay: python -m tests.simulation --seed {found.seed} --schedules 1{short} --trace")
    return 1


if __name__ == "__main__":
    sys.exit(main())
