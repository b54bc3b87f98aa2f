"""One bench per test module, for the tests of it that were selected."""

from collections.abc import Iterator

import pytest

from tests.mutants.proof import Proof, trial_of
from tests.mutants.trials import Bench


@pytest.fixture(scope="module")
def proof(request: pytest.FixtureRequest) -> Iterator[Proof]:
    mine = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid + "::")]
    chosen = [item.callspec.params for item in mine]
    trials = [params["trial"] if "trial" in params else trial_of(params["mutant"]) for params in chosen]
    with Bench(trials) as bench:
        yield Proof(bench)
