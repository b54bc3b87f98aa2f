"""The transports' suite fails each transport of `transport_claims.py`, by the case that is meant for its fault."""

import pytest

from tests.mutants import Mutant, mutants_of, transport_claims
from tests.mutants.proof import Proof, whole_trials
from tests.mutants.trials import Trial

MUTANTS = mutants_of(transport_claims)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_broken_transport_is_caught(mutant: Mutant, proof: Proof) -> None:
    proof.check_caught(mutant)


@pytest.mark.parametrize("trial", whole_trials(MUTANTS), ids=str)
def test_the_same_case_passes_for_the_whole_one(trial: Trial, proof: Proof) -> None:
    proof.check_whole(trial)
