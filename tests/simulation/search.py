"""`python -m tests.simulation.search [NAME ...]`: for each mutation the first schedule that catches it, short if possible."""

from __future__ import annotations

import itertools
import logging
import sys
import time

from .mutations import MUTATIONS, Mutation, mutated
from .runner import run_one
from .settings import Profile

PATIENCE_S = 40.0


def first_catch(mutation: Mutation, profile: Profile) -> str | None:
    """What to pin; None where no schedule of that profile caught it in time."""
    until = time.monotonic() + PATIENCE_S
    others: dict[str, int] = {}
    with mutated(mutation):
        for seed in itertools.count():
            found = run_one(seed, profile)
            if found is not None and found.violation.invariant == mutation.invariant:
                return f"{seed}, {profile}  # {found.violation}  {others}"
            if found is not None:
                others.setdefault(found.violation.invariant, seed)
            if time.monotonic() > until:
                print(f"  {mutation.name}: not in {seed} {profile} schedules: {others}")
                return None
    raise AssertionError


def main() -> None:
    logging.disable(logging.CRITICAL)
    for mutation in MUTATIONS:
        if not sys.argv[1:] or mutation.name in sys.argv[1:]:
            line = first_catch(mutation, "short") or first_catch(mutation, "long") or "not caught"
            print(f"{mutation.name} {mutation.invariant} {line[:300]}", flush=True)


if __name__ == "__main__":
    main()
