"""How many failures count as a death."""

import pytest

from tllm_core.contracts.messages import ErrorReport
from tllm_core.world.budget import BudgetExhausted, ErrorBudget
from tllm_core.world.words import failed_of, obituary_of

ILL = ErrorReport("no memory for block 7")


def spend(budget: ErrorBudget, *times: float, error: ErrorReport = ILL) -> None:
    for now in times:
        budget.spend(error, now)
        budget.check()


def test_as_many_failures_as_the_budget_within_its_window_are_a_death() -> None:
    budget = ErrorBudget(3, 10.0)
    spend(budget, 100.0, 104.0)
    with pytest.raises(
        BudgetExhausted, match=r"^3 requests failed in the engine within 9\.5 s, .*: no memory for block 7$"
    ):
        spend(budget, 109.5)


def test_failures_that_are_spread_are_none() -> None:
    budget = ErrorBudget(3, 10.0)
    spend(budget, *(5.0 * i for i in range(1000)))
    with pytest.raises(BudgetExhausted):
        spend(budget, 4995.5)


def test_the_first_failure_is_a_death_where_the_budget_is_one() -> None:
    with pytest.raises(BudgetExhausted, match=r"^1 request failed"):
        spend(ErrorBudget(1, 10.0), 5.0)


def test_what_a_request_is_to_blame_for_costs_nothing() -> None:
    spend(ErrorBudget(1, 10.0), 1.0, 2.0, error=ErrorReport("the schema can't be compiled", field="extra"))


def test_without_a_budget_no_number_is_a_death() -> None:
    spend(ErrorBudget(None, 10.0), *[1.0] * 10_000)


def test_the_end_is_told_in_one_line_without_a_traceback() -> None:
    with pytest.raises(BudgetExhausted) as caught:
        spend(ErrorBudget(1, 10.0), 5.0)
    words, last = failed_of(caught.value, 0), obituary_of(caught.value)
    assert (words.message, words.traceback) == (last.message, last.traceback) == (str(caught.value), None)
