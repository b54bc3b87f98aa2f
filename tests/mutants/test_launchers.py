"""The launchers' suite fails each launcher of `launcher_*.py`, by the case that is meant for its fault."""

import pytest

from tests.mutants import Mutant, launcher_ends, launcher_starts, mutants_of
from tests.mutants.proof import Proof, whole_trials
from tests.mutants.trials import Trial

MUTANTS = mutants_of(launcher_starts, launcher_ends)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_broken_launcher_is_caught(mutant: Mutant, proof: Proof) -> None:
    proof.check_caught(mutant)


@pytest.mark.parametrize("trial", whole_trials(MUTANTS), ids=str)
def test_the_same_case_passes_for_the_whole_one(trial: Trial, proof: Proof) -> None:
    proof.check_whole(trial)
