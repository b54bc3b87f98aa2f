"""Requests that fail one by one are their own affair, until there are more of them than the engine's budget allows."""

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds
from tllm_core import EngineDeadError, RequestError, SamplingParams
from tllm_core.engines.echo import expected_tokens

ILL = 666
FAULTS = [{"at": "step", "do": "request_error", "token": ILL, "message": "no memory for a block"}]
EXHAUSTED = r"^3 requests failed in the engine within \d+\.\d s, .*error_budget.*; the last one: no memory for a block$"


def test_failures_within_the_window_end_the_world_for_everybody(anywhere: Worlds) -> None:
    executor = anywhere(faults=FAULTS, settings={"liveness.error_budget": 3}, **SLOW)
    streams = [executor.generate_async([i], LONG) for i in (1, 2)]
    for stream in streams:
        next(stream)
    for _ in range(2):
        with pytest.raises(RequestError, match="no memory for a block"):
            executor.generate_async([ILL]).result(DEADLINE_S)
    assert executor.check_health()
    last = executor.generate_async([ILL])
    for i, stream in enumerate(streams, 1):
        with pytest.raises(EngineDeadError, match=EXHAUSTED) as caught:
            stream.result(DEADLINE_S)
        assert caught.value.root_cause.rank == 0
        tokens = stream.outputs[0].token_ids
        assert tokens
        assert tokens == expected_tokens([i], len(tokens))
    with pytest.raises(RequestError, match="no memory for a block"):
        last.result(DEADLINE_S)
    assert executor.health().state == "dead"
    with pytest.raises(EngineDeadError, match=EXHAUSTED):
        executor.generate_async([1])


def test_many_that_fail_in_one_step_each_hear_of_their_own_error_first(anywhere: Worlds) -> None:
    executor = anywhere(faults=FAULTS, settings={"liveness.error_budget": 3}, **SLOW)
    executor.control("pause")
    results = [executor.generate_async([ILL, i]) for i in range(1, 9)]
    executor.control("resume")
    for result in results:
        with pytest.raises(RequestError, match="no memory for a block"):
            result.result(DEADLINE_S)
    with pytest.raises(EngineDeadError, match=EXHAUSTED):
        executor.generate_async([1], LONG).result(DEADLINE_S)


def test_failures_that_are_spread_end_nothing(anywhere: Worlds) -> None:
    settings = {"liveness.error_budget": 2, "liveness.error_budget_window_s": 0.001}
    executor = anywhere(faults=FAULTS, settings=settings, **SLOW)
    for _ in range(6):
        with pytest.raises(RequestError):
            executor.generate_async([ILL]).result(DEADLINE_S)
    assert executor.generate([1], SamplingParams(max_tokens=2)).finished  # type: ignore[union-attr]
    assert executor.check_health()


def test_what_is_rejected_or_invalid_costs_nothing(anywhere: Worlds) -> None:
    refused = [{"at": "submit", "do": "request_error", "token": ILL}]
    executor = anywhere(faults=refused, settings={"liveness.error_budget": 1})
    for _ in range(3):
        with pytest.raises(RequestError):
            executor.generate_async([ILL]).result(DEADLINE_S)
        with pytest.raises(RequestError):
            executor.generate_async([], LONG)
    assert executor.check_health()


def test_without_a_budget_any_number_may_fail(anywhere: Worlds) -> None:
    executor = anywhere(faults=FAULTS)
    for result in [executor.generate_async([ILL, i]) for i in range(1, 33)]:
        with pytest.raises(RequestError):
            result.result(DEADLINE_S)
    assert executor.check_health()
