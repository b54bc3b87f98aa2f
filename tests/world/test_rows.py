"""Rows into columns and back, and what parking makes of them."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tllm_core.contracts.messages import ErrorReport, Logprob, Output, RequestMetrics, RowExtra
from tllm_core.world.rows import Parked, Rows, batch_of, merged_extra, rows_of

outputs = st.builds(
    Output,
    request_id=st.integers(1, 4),
    token_ids=st.lists(st.integers(0, 99), max_size=3),
    index=st.integers(0, 2),
    finish_reason=st.sampled_from([None, None, None, "stop", "length"]),
    extra=st.sampled_from([None, None, {"a": 1}]),
)


def collect(step):
    rows = Rows()
    for output in step:
        rows.add(output.request_id, output)
    return rows.take()


@given(st.lists(outputs, max_size=8))
def test_columns_hold_exactly_what_was_added(step):
    batch = collect(step)
    rows = list(rows_of(batch))
    assert [(row.client_id, row.index, list(row.token_ids)) for row in rows] == [
        (output.request_id, output.index, output.token_ids) for output in step
    ]
    assert [row.finish is not None for row in rows] == [output.finish_reason is not None for output in step]
    assert [row.extra is not None for row in rows] == [output.extra is not None for output in step]
    assert list(rows_of(batch_of(rows))) == rows


@given(st.lists(st.lists(outputs, max_size=6), max_size=6))
def test_parking_changes_no_sequence(steps):
    parked, expected, finished = Parked(), defaultdict(list), set()
    for step in steps:
        parked.absorb(collect(step))
        for output in step:
            expected[output.request_id, output.index] += output.token_ids
            if output.finish_reason:
                finished.add((output.request_id, output.index))
    rows = list(rows_of(batch_of(parked.rows())))
    assert {(row.client_id, row.index): list(row.token_ids) for row in rows} == expected
    assert len(rows) == len(expected)
    assert {(row.client_id, row.index) for row in rows if row.finish} == finished


@given(st.lists(outputs, max_size=8))
def test_filling_whole_steps_gives_the_same_columns_or_declines(step):
    rows = Rows()
    if rows.fill([output.request_id for output in step], step):
        assert rows.take() == collect(step)
    else:
        assert any(output.index or len(output.token_ids) != 1 for output in step)
        assert rows.take() == collect([])


def test_one_token_each_of_first_sequences_needs_no_columns_for_it():
    batch = collect([Output(request_id=1, token_ids=(5,)), Output(request_id=2, token_ids=(6,))])
    assert (batch.client_ids, batch.token_ids, batch.counts, batch.indexes) == ([1, 2], [5, 6], None, None)


def test_an_error_comes_after_what_other_sequences_of_its_request_have():
    parked = Parked()
    parked.absorb(collect([Output(request_id=1, token_ids=(5,), index=i) for i in range(3)]))
    parked.absorb(collect([Output(request_id=1, error=ErrorReport("broken"))]))
    assert [row.index for row in parked.rows()] == [1, 2, 0]
    assert parked.rows()[-1].extra.error.message == "broken"


def test_lists_of_extras_are_joined_and_of_the_rest_the_later_stands():
    first = RowExtra(logprobs=[[Logprob(1, -1.0, 1)]], prompt_logprobs=[[]], extra={"a": 1, "b": 1})
    second = RowExtra(logprobs=[[Logprob(2, -1.0, 1)]], metrics=RequestMetrics(), extra={"b": 2})
    both = merged_extra(first, second)
    assert [position[0].token_id for position in both.logprobs] == [1, 2]
    assert (both.prompt_logprobs, both.metrics, both.extra) == ([[]], RequestMetrics(), {"a": 1, "b": 2})


def test_what_is_parked_is_weighed_and_the_weight_goes_with_it():
    parked = Parked()
    parked.absorb(collect([Output(request_id=1, token_ids=(5,), extra={"pad": bytes(10_000)})]))
    parked.absorb(collect([Output(request_id=2, token_ids=(5,))]))
    assert 10_000 < parked.size < 11_000
    parked.keep(parked.rows()[1:])
    assert 0 < parked.size < 200
    parked.keep([])
    assert (parked.size, len(parked)) == (0, 0)
