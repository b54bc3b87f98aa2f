"""`python -m tests.simulation.search [NAME ...]`: finds for each mutation the first schedule that catches it."""

from __future__ import annotations

import itertools
import logging
import sys
import time

from .mutations import MUTATIONS, Mutation, mutated
from .runner import run_one

PATIENCE_S = 25.0


def first_catch(mutation: Mutation) -> str:
    until = time.monotonic() + PATIENCE_S
    others: dict[str, int] = {}
    with mutated(mutation):
        for seed in itertools.count():
            if time.monotonic() > until:
                return f"not caught by {mutation.invariant} in {seed} schedules; {others}"
            found = run_one(seed)
            if found is not None and found.violation.invariant == mutation.invariant:
                return f"{seed}  # {found.violation}  {others}"
            if found is not None:
                others.setdefault(found.violation.invariant, seed)
    raise AssertionError


def main() -> None:
    logging.disable(logging.CRITICAL)
    for mutation in MUTATIONS:
        if not sys.argv[1:] or mutation.name in sys.argv[1:]:
            print(f"{mutation.name} {mutation.invariant} {first_catch(mutation)[:300]}", flush=True)


if __name__ == "__main__":
    main()
