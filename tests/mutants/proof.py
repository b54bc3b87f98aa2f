"""What a mutant's test demands of the case that must catch it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.mutants import Mutant
from tests.mutants.trials import Bench, Trial
from tllm_core.conformance.report import Outcome

BY_THE_SUITE = re.compile(r"AssertionError\b|assert |Failed: ")
"""An assertion, a time limit, or an exception that did not come. Whatever else a case may die of proves nothing."""


def trial_of(mutant: Mutant) -> Trial:
    return Trial(mutant.kind, mutant.suite, mutant.catches, mutant.reference)


def whole_trials(mutants: Iterable[Mutant]) -> list[Trial]:
    """Every case that must catch one of them, over the class of ours."""
    pairs = sorted({(mutant.kind, mutant.suite, mutant.catches) for mutant in mutants})
    return [Trial(kind, suite, case) for kind, suite, case in pairs]


class Proof:
    """The trials of one test module, and what must come of them."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def check_caught(self, mutant: Mutant) -> None:
        """The case that is meant for it fails, and by its own words."""
        outcome = self._outcome(trial_of(mutant))
        seen = f"{mutant} by {mutant.catches}: {outcome.result}, {outcome.words}\n{outcome.details}"
        assert outcome.result == "fail", f"not caught: {seen}"
        assert BY_THE_SUITE.match(outcome.words), f"not caught by an assertion of the suite: {seen}"
        assert re.search(mutant.words, outcome.words), f"caught for another reason than {mutant.words!r}: {seen}"

    def check_whole(self, trial: Trial) -> None:
        """The same case passes, or is about what the mutant claims and the class of ours does not."""
        outcome = self._outcome(trial)
        fine = ("pass", "not claimed", "does not apply")
        assert outcome.result in fine, f"{trial}: {outcome.result}, {outcome.words}\n{outcome.details}"

    def _outcome(self, trial: Trial) -> Outcome:
        told = self._bench.told(trial)
        assert not told.broken, f"{trial} could not be run: {told.broken}"
        found = {f"test_{outcome.case}": outcome for outcome in told.outcomes}
        assert trial.case in found, f"there is no case {trial.case}"
        return found[trial.case]
