"""The simulation can fail: each known wrong variant is caught by its schedule, and by the promise that it breaks."""

from __future__ import annotations

import logging

import pytest

from .mutations import MUTATIONS, Mutation, mutated
from .runner import run_one
from .settings import Profile


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


FURTHER = 600
"""A change of the product's timing moves every schedule a little: so many others may then catch what the pinned one did."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_wrong_variant_is_caught(mutation: Mutation):
    """By its pinned schedule; `python -m tests.simulation.search NAME` finds the next one to pin."""
    seen: dict[str, int] = {}
    with mutated(mutation):
        for seed in (mutation.seed, *range(FURTHER)):
            found = run_one(seed, mutation.profile)
            if found is not None and found.violation.invariant == mutation.invariant:
                break
            if found is not None:
                seen[found.violation.invariant] = seed
        else:
            pytest.fail(f"{mutation.name} is not caught by {mutation.invariant} in {FURTHER} schedules: {seen}")
    if seed != mutation.seed:
        print(f"{mutation.name} is now caught by schedule {seed}, no more by {mutation.seed}")


@pytest.mark.parametrize(("profile", "seed"), sorted({(mutation.profile, mutation.seed) for mutation in MUTATIONS}))
def test_the_same_schedule_is_clean_without_it(profile: Profile, seed: int):
    found = run_one(seed, profile)
    assert found is None, found.violation


def test_each_invariant_catches_something():
    assert {mutation.invariant for mutation in MUTATIONS} == {f"I{number}" for number in range(1, 13)} - {"I7"}
