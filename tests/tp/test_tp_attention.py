"""The index tensors of a batch, and attention over pages against attention over what was never paged."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_core.engines.tp.attention import AttentionMetadata, AttentionShape
from tllm_core.engines.tp.attention.torch import TorchAttention, group_by_length
from tllm_core.engines.tp.batch import ScheduledBatch

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@st.composite
def batches(draw: st.DrawFn) -> tuple[ScheduledBatch, int]:
    """Sequences that decode, then chunks, with pages scattered over a pool, and the block size."""
    block_size = draw(st.sampled_from([1, 2, 3, 16]))
    lengths = st.tuples(st.integers(0, 40), st.integers(1, 20))
    decodes = draw(st.lists(st.integers(0, 60), max_size=5))
    chunks = draw(st.lists(lengths, min_size=0 if decodes else 1, max_size=3))
    contexts = decodes + [context for context, _ in chunks]
    queries = [1] * len(decodes) + [query for _, query in chunks]
    pages = [-(-(c + q) // block_size) for c, q in zip(contexts, queries, strict=True)]
    pool = draw(st.permutations(range(sum(pages) + 2)))
    tables, at = [], 0
    for count in pages:
        tables.append(list(pool[at : at + count]))
        at += count
    tokens = array("i", range(sum(queries)))
    batch = ScheduledBatch(
        token_ids=tokens,
        query_lens=queries,
        context_lens=contexts,
        block_tables=tables,
        logits_rows=[],
        num_decodes=len(decodes),
    )
    return batch, block_size


@given(batches())
def test_every_index_tensor_says_where_each_token_lives(case: tuple[ScheduledBatch, int]) -> None:
    batch, block_size = case
    m = AttentionMetadata.of(batch, block_size)
    seq_lens = [c + q for c, q in zip(batch.context_lens, batch.query_lens, strict=True)]
    assert m.seq_lens.tolist() == seq_lens
    assert m.qo_indptr.diff().tolist() == batch.query_lens
    assert m.kv_indptr.diff().tolist() == [-(-length // block_size) for length in seq_lens]
    assert all(1 <= rows <= block_size for rows in m.last_page_len.tolist())
    # FlashInfer's get_seq_lens, by its definition.
    assert ((m.kv_indptr.diff() - 1).clamp(min=0) * block_size + m.last_page_len).tolist() == seq_lens
    expected = [
        (i, position, batch.block_tables[i][position // block_size] * block_size + position % block_size)
        for i, context in enumerate(batch.context_lens)
        for position in range(context, seq_lens[i])
    ]
    assert list(zip(*(t.tolist() for t in (m.batch_indices, m.positions, m.slot_mapping)), strict=True)) == expected
    assert len(set(m.slot_mapping.tolist())) == m.num_tokens
    tensors = [value for value in (getattr(m, name) for name in m.__slots__) if isinstance(value, torch.Tensor)]
    assert len(tensors) == 8
    assert all(tensor.dtype == torch.int32 and tensor.device.type == "cpu" for tensor in tensors)


@given(batches())
def test_sequences_of_one_token_at_the_front_decode_together(case: tuple[ScheduledBatch, int]) -> None:
    batch, block_size = case
    m = AttentionMetadata.of(batch, block_size)
    assert batch.num_decodes <= m.num_decodes <= m.num_sequences
    assert all(length == 1 for length in batch.query_lens[: m.num_decodes])
    assert m.num_decodes == m.num_sequences or batch.query_lens[m.num_decodes] > 1


def test_a_table_that_does_not_cover_its_sequence_is_refused() -> None:
    batch = ScheduledBatch(
        token_ids=array("i", [1]), query_lens=[1], context_lens=[16], block_tables=[[0]], logits_rows=[0]
    )
    with pytest.raises(ValueError, match="does not cover"):
        AttentionMetadata.of(batch, 16)


def test_a_table_may_be_longer_than_its_sequence() -> None:
    batch = ScheduledBatch(
        token_ids=array("i", [1]), query_lens=[1], context_lens=[3], block_tables=[[5, 6, 7]], logits_rows=[0]
    )
    assert AttentionMetadata.of(batch, 4).kv_indices.tolist() == [5]


@settings(max_examples=120, deadline=None)
@given(
    case=batches(), window=st.none() | st.integers(1, 90), scale=st.sampled_from([None, 0.7]), seed=st.integers(0, 9)
)
def test_paged_attention_equals_attention_over_each_sequence_alone(
    case: tuple[ScheduledBatch, int], window: int | None, scale: float | None, seed: int
) -> None:
    batch, block_size = case
    torch.manual_seed(seed)
    attention = _backend(batch, block_size, windows=(window,), scale=scale)
    metadata = AttentionMetadata.of(batch, block_size)
    lengths = metadata.seq_lens.tolist()
    keys, values = ([torch.randn(length, KV_HEADS, HEAD_DIM) for length in lengths] for _ in range(2))
    _store_contexts(attention, batch, block_size, keys, values)
    q = torch.randn(metadata.num_tokens, HEADS, HEAD_DIM)
    attention.plan(metadata)
    new = [slice(c, n) for c, n in zip(batch.context_lens, lengths, strict=True)]
    kv = (torch.cat((k[own], v[own]), dim=1) for k, v, own in zip(keys, values, new, strict=True))
    attention.write_kv(0, torch.cat(list(kv)))
    out = attention.run(0, q)
    queries = q.split(batch.query_lens)
    expected = torch.cat([_attend(*parts, window, scale) for parts in zip(queries, keys, values, strict=True)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 2000), max_size=40))
def test_groups_hold_each_sequence_once_and_padding_stays_small(page_counts: list[int]) -> None:
    groups = group_by_length(page_counts)
    assert sorted(i for group in groups for i in group) == list(range(len(page_counts)))
    padded = sum(len(group) * max(page_counts[i] for i in group) for group in groups)
    assert padded <= 2 * sum(page_counts) + 32 * len(groups)


def test_sequences_of_similar_length_stay_one_group_in_order() -> None:
    assert group_by_length([7, 9, 8, 12]) == [[0, 1, 2, 3]]


def test_a_long_sequence_among_short_ones_is_computed_apart() -> None:
    assert group_by_length([2, 500, 3, 2]) == [[1], [2, 0, 3]]


def test_what_another_sequence_left_in_a_page_is_not_seen() -> None:
    attention = TorchAttention(_shape(num_blocks=2, block_size=4))
    attention.cache.fill_(1e4)
    batch = ScheduledBatch(
        token_ids=array("i", [1]), query_lens=[1], context_lens=[0], block_tables=[[1]], logits_rows=[0]
    )
    attention.plan(AttentionMetadata.of(batch, 4))
    kv = torch.randn(1, 2 * KV_HEADS, HEAD_DIM)
    attention.write_kv(0, kv)
    out = attention.run(0, torch.randn(1, HEADS, HEAD_DIM))
    torch.testing.assert_close(out.view(HEADS, HEAD_DIM), kv[0, KV_HEADS:].repeat_interleave(HEADS // KV_HEADS, 0))


def test_a_page_that_the_window_has_left_is_not_read() -> None:
    """What is there may be anything: a NaN in it would reach the result even at a weight of zero."""
    batch = ScheduledBatch(
        token_ids=array("i", [1, 1, 2]),
        query_lens=[1, 2],
        context_lens=[9, 9],
        block_tables=[[0, 1, 2], [3, 4, 5]],
        logits_rows=[0],
    )
    attention = _backend(batch, 4, windows=(4, None))
    attention.cache[:, :, [0, 3]] = float("nan")
    attention.plan(AttentionMetadata.of(batch, 4))
    for layer, finite in ((0, True), (1, False)):
        attention.write_kv(layer, torch.randn(3, 2 * KV_HEADS, HEAD_DIM))
        assert bool(attention.run(layer, torch.randn(3, HEADS, HEAD_DIM)).isfinite().all()) is finite


def test_blocks_are_copied_in_all_layers_as_if_all_were_read_first() -> None:
    backend = TorchAttention(_shape(num_blocks=5, block_size=2, windows=(None, None)))
    backend.cache.copy_(torch.randn(backend.cache.shape))
    before = backend.cache.clone()
    backend.copy([0, 1, 3], [1, 2, 3])
    assert torch.equal(backend.cache, before[:, :, [0, 0, 1, 3, 4]])


def _backend(
    batch: ScheduledBatch, block_size: int, windows: tuple[int | None, ...] = (None,), scale: float | None = None
) -> TorchAttention:
    blocks = max((block for table in batch.block_tables for block in table), default=0) + 1
    return TorchAttention(_shape(blocks, block_size, windows, scale))


def _shape(
    num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,), scale: float | None = None
) -> AttentionShape:
    return AttentionShape(
        num_layers=len(windows),
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        scale=scale,
        windows=windows,
    )


def _store_contexts(
    attention: TorchAttention,
    batch: ScheduledBatch,
    block_size: int,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> None:
    for i, table in enumerate(batch.block_tables):
        for position in range(batch.context_lens[i]):
            block, row = table[position // block_size], position % block_size
            attention.cache[0, 0, block, row] = keys[i][position]
            attention.cache[0, 1, block, row] = values[i][position]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float | None) -> torch.Tensor:
    """The definition, in plain matrix products."""
    group = HEADS // KV_HEADS
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or HEAD_DIM**-0.5)
    own = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    others = torch.arange(k.shape[0])
    unseen = (others > own) | (others <= own - (window or k.shape[0]))
    scores = scores.masked_fill(unseen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
