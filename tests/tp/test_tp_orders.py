"""What rank 0 says is what the others hear."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.orders import Order, batch_of, order_of, order_to_execute, order_with_text, text_of

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)


@st.composite
def batches(draw: st.DrawFn) -> ScheduledBatch:
    sequences = draw(st.integers(0, 9))
    some = {"min_size": sequences, "max_size": sequences}
    return ScheduledBatch(
        token_ids=array("i", draw(st.lists(INT32, max_size=40))),
        query_lens=draw(st.lists(COUNT, **some)),
        context_lens=draw(st.lists(COUNT, **some)),
        block_tables=draw(st.lists(st.lists(COUNT, max_size=12), **some)),
        logits_rows=draw(st.lists(COUNT, max_size=40)),
        num_decodes=draw(COUNT),
        copies=draw(st.lists(st.tuples(COUNT, COUNT), max_size=5)),
    )


@given(batches())
def test_a_batch_comes_back_as_it_was(batch: ScheduledBatch) -> None:
    order = order_to_execute(batch)
    assert isinstance(order, array)
    assert order.typecode == "i"
    assert order[0] == Order.EXECUTE
    assert batch_of(order) == batch


def test_every_field_of_a_batch_crosses() -> None:
    """A field that is added later and forgotten in the order would leave the other ranks with its default."""
    full = ScheduledBatch(
        token_ids=array("i", [7, 8, 9]),
        query_lens=[1, 2],
        context_lens=[4, 0],
        block_tables=[[3], [5, 6]],
        logits_rows=[0, 2],
        num_decodes=1,
        copies=[(1, 2), (8, 9)],
    )
    assert all(getattr(full, name) for name in ScheduledBatch.__struct_fields__), "this test leaves a field empty"
    assert batch_of(order_to_execute(full)) == full


@given(st.sampled_from(Order), st.text(st.characters(exclude_characters="\0")))
def test_texts_and_numbers_come_back(kind: Order, text: str) -> None:
    order = order_with_text(kind, text)
    assert (order[0], text_of(order)) == (kind, text)
    assert order_of(kind, [1, -2]) == array("i", [kind, 1, -2])


def test_a_token_that_is_no_int32_is_not_sent_as_another() -> None:
    batch = ScheduledBatch(
        token_ids=array("i"), query_lens=[2**31], context_lens=[0], block_tables=[[]], logits_rows=[]
    )
    with pytest.raises(OverflowError):
        order_to_execute(batch)
