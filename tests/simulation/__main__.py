"""`python -m tests.simulation --seed N --schedules M --trace`: schedules N to N + M - 1; exits with 1 if one breaks a promise."""

from __future__ import annotations

import argparse
import logging
import sys

from .runner import measured, run_one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first schedule's number")
    parser.add_argument("--schedules", type=int, default=1000, help="how many schedules")
    parser.add_argument("--trace", action="store_true", help="print what happens in each")
    options = parser.parse_args()
    if options.trace:
        logging.disable(logging.CRITICAL)
        for seed in range(options.seed, options.seed + options.schedules):
            found = run_one(seed, traced=True)
            if found is not None:
                break
    else:
        found, wall_s, cpu_s = measured(range(options.seed, options.seed + options.schedules))
        if found is None:
            rate, cpu_rate = options.schedules / wall_s, options.schedules / cpu_s
            print(f"{options.schedules} schedules, {rate:.0f} per second ({cpu_rate:.0f} per second of CPU time)")
    if found is None:
        return 0
    print("\n".join(found.lines))
    print(f"schedule {found.seed}: {found.violation}")
    print(f"replay: python -m tests.simulation --seed {found.seed} --schedules 1 --trace")
    return 1


if __name__ == "__main__":
    sys.exit(main())
