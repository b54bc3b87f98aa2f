"""Attention in plain torch: any device and type, and the reference for faster backends.

Sequences that decode are computed together: their pages are gathered into a padded block, and the query heads that share a
kv head are that head's query rows, so that nothing is expanded. Prompts are computed one by one, straight from this
step's keys and values where they have no context yet. Layers with a sliding window read only the pages that it touches.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.attention import AttentionBackend, AttentionShape
from tllm_core.engines.tp.attention.metadata import AttentionMetadata

_SPLIT_PAGES = 32
"""Padding pages that cost about as much as one more group's calls; measured."""
_PIECE_ROWS = 64
"""Rows of a prompt that are computed at once, over no more keys than the last of them sees; measured."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length. rows: [size] their tokens, None = all decoding tokens in order.

    pages: see `_keys_and_values`. longest: keys of each that are computed with, from the first page on. mask: None where all
    of them count.
    """

    rows: torch.Tensor | None
    size: int
    pages: torch.Tensor
    longest: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A piece of a prompt: tokens start:end of the batch. pages: None where it has no context; they hold `num_keys` keys.

    pieces: per `_PIECE_ROWS` tokens where they start and end in the batch, the first key that any of them sees, and their
    mask [rows, keys from that one on].
    """

    start: int
    end: int
    num_keys: int
    pages: torch.Tensor | None
    pieces: list[tuple[int, int, int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One step for all layers of the same window."""

    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchAttention(AttentionBackend):
    """`cache`: [layers, 2, num_blocks, block_size, kv_heads, head_dim], keys at 0 and values at 1 of the second axis."""

    def __init__(self, shape: AttentionShape) -> None:
        rows = (shape.num_kv_heads, shape.head_dim)
        blocks = (shape.num_blocks, shape.block_size, *rows)
        # Zeros, not empty: rows that were never written are multiplied by a weight of zero, and NaN * 0 is NaN.
        self.cache = _zeros((shape.num_layers, 2, *blocks), shape.dtype, shape.device)
        self._rows = [layer.view(2, shape.num_blocks * shape.block_size, *rows) for layer in self.cache]
        self._pages = [layer.view(2 * shape.num_blocks, -1) for layer in self.cache]
        self._buffer = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self._new_kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self._slots = torch.empty(0, dtype=torch.int64, device=shape.device)
        self._scale, self._windows = shape.scale, shape.layer_windows
        self._plans: dict[int | None, _Plan] = {}
        self._num_decodes = 0

    def clear(self, blocks: Sequence[int]) -> None:
        self.cache.index_fill_(2, torch.tensor(blocks, dtype=torch.int64, device=self.cache.device), 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read, written = torch.tensor([sources, targets], dtype=torch.int64, device=self.cache.device)
        self.cache.index_copy_(2, written, self.cache.index_select(2, read))

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slots = metadata.slot_mapping.to(self.cache.device, torch.int64)
        self._num_decodes = metadata.num_decodes
        longest = int(metadata.seq_lens.max())
        whole = self._plan_window(metadata, None)
        # Most sequences are shorter than their model's window.
        self._plans = {
            window: whole if window is None or longest <= window else self._plan_window(metadata, window)
            for window in set(self._windows)
        }

    def write_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self._rows[layer]
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)
        self._new_kv = (k, v)

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        plan = self._plans[self._windows[layer]]
        if not plan.chunks and len(plan.groups) == 1:
            return self._decode(layer, q, plan.groups[0])
        out = q.new_empty(tokens, heads * head_dim)
        for group in plan.groups:
            if group.rows is None:
                out[: self._num_decodes] = self._decode(layer, q[: self._num_decodes], group)
            else:
                out.index_copy_(0, group.rows, self._decode(layer, q.index_select(0, group.rows), group))
        for chunk in plan.chunks:
            self._prefill(layer, q, chunk, out.view(tokens, heads, head_dim))
        return out

    # -------------------------------------------------------------------------------------------------- plan

    def _plan_window(self, metadata: AttentionMetadata, window: int | None) -> _Plan:
        """`window` None = every token sees all before it."""
        decodes = metadata.num_decodes
        seq_lens = metadata.seq_lens[:decodes]
        begins = torch.zeros_like(seq_lens) if window is None else (seq_lens - window).clamp_(min=0)
        page_counts = metadata.kv_indptr[: decodes + 1].diff() - begins // metadata.block_size
        groups = group_by_length(page_counts.tolist())
        return _Plan(
            [self._plan_group(metadata, group, begins, len(groups) == 1) for group in groups],
            [self._plan_chunk(metadata, i, window) for i in range(decodes, metadata.num_sequences)],
        )

    def _plan_group(
        self, metadata: AttentionMetadata, group: list[int], begins: torch.Tensor, whole: bool
    ) -> _DecodeGroup:
        """`begins`: [decodes] the first position that each sequence's token sees."""
        members = torch.tensor(group)
        block_size = metadata.block_size
        skipped = begins[members] // block_size
        starts = metadata.kv_indptr[members] + skipped
        firsts = begins[members] - skipped * block_size
        lengths = metadata.seq_lens[members] - skipped * block_size
        counts = metadata.kv_indptr[members + 1] - starts
        # A short sequence is padded with its own last page, so that it never reads what others wrote there.
        columns = torch.arange(int(counts.max())).expand(len(group), -1).minimum(counts.unsqueeze(1) - 1)
        pages = metadata.kv_indices[starts.unsqueeze(1) + columns]
        longest = int(lengths.max())
        mask = None
        if int(lengths.min()) != longest or int(firsts.max()):
            places = torch.arange(longest)
            unseen = (places < firsts.unsqueeze(1)) | (places >= lengths.unsqueeze(1))
            mask = torch.zeros(unseen.shape, dtype=self.cache.dtype).masked_fill_(unseen, float("-inf"))
            mask = mask.view(len(group), 1, 1, longest).to(self.cache.device)
        return _DecodeGroup(
            rows=None if whole else members.to(self.cache.device),
            size=len(group),
            pages=self._keys_and_values(pages),
            longest=longest,
            mask=mask,
        )

    def _plan_chunk(self, metadata: AttentionMetadata, i: int, window: int | None) -> _Chunk:
        start, end = metadata.qo_indptr[i : i + 2].tolist()
        seq_len = int(metadata.seq_lens[i])
        context, pages, base = seq_len - (end - start), None, 0
        if context:
            skipped = 0 if window is None else max(0, context + 1 - window) // metadata.block_size
            first, last = metadata.kv_indptr[i : i + 2].tolist()
            pages = self._keys_and_values(metadata.kv_indices[first + skipped : last].unsqueeze(0))
            base = skipped * metadata.block_size
        pieces = []
        for top in range(start, end, _PIECE_ROWS):
            bottom = min(top + _PIECE_ROWS, end)
            low = base if window is None else max(base, context + (top - start) + 1 - window)
            own = metadata.positions[top:bottom].unsqueeze(1)
            keys = torch.arange(low, context + (bottom - start))
            unseen = keys > own if window is None else (keys > own) | (keys <= own - window)
            mask = torch.zeros(unseen.shape, dtype=self.cache.dtype).masked_fill_(unseen, float("-inf"))
            pieces.append((top, bottom, low - base, mask.to(self.cache.device)))
        return _Chunk(start, end, seq_len - base, pages, pieces)

    # --------------------------------------------------------------------------------------------------- run

    def _decode(self, layer: int, q: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        k, v = self._gather(layer, group.pages, group.size, group.longest)
        kv_heads, head_dim = k.shape[1], k.shape[3]
        grouped = q.view(group.size, kv_heads, -1, head_dim)
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=self._scale)
        return mixed.reshape(group.size, -1)

    def _prefill(self, layer: int, q: torch.Tensor, chunk: _Chunk, out: torch.Tensor) -> None:
        if chunk.pages is None:
            assert self._new_kv is not None
            k, v = (new[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0) for new in self._new_kv)
        else:
            k, v = self._gather(layer, chunk.pages, 1, chunk.num_keys)
        queries, into = q.transpose(0, 1).unsqueeze(0), out.transpose(0, 1).unsqueeze(0)
        for top, bottom, low, mask in chunk.pieces:
            seen = slice(low, low + mask.shape[1])
            into[:, :, top:bottom] = F.scaled_dot_product_attention(
                queries[:, :, top:bottom],
                k[:, :, seen],
                v[:, :, seen],
                attn_mask=mask,
                scale=self._scale,
                enable_gqa=True,
            )

    # ------------------------------------------------------------------------------------------------- pages

    def _keys_and_values(self, pages: torch.Tensor) -> torch.Tensor:
        """pages: [size, count] of each sequence. [2 * size * count] rows of the cache viewed as [2 * num_blocks, ...]: each
        sequence's keys, then its values, so that the core that gathers a sequence is the one that attends to it."""
        return torch.cat((pages, pages + self.cache.shape[2]), dim=1).flatten().to(self.cache.device)

    def _gather(self, layer: int, pages: torch.Tensor, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [size, kv_heads, length, head_dim] each: views of a buffer that the next call overwrites."""
        source = self._pages[layer]
        count = pages.shape[0] * source.shape[1]
        if self._buffer.numel() < count:
            self._buffer = self._buffer.new_empty(2 * count)
        into = self._buffer[:count].view(pages.shape[0], source.shape[1])
        torch.index_select(source, 0, pages, out=into)
        kv_heads, head_dim = self.cache.shape[4:]
        both = into.view(size, 2, -1, kv_heads, head_dim)[:, :, :length].transpose(2, 3)
        return both[:, 0], both[:, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the pages are the system's own zeros, which take memory and time only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def group_by_length(page_counts: list[int]) -> list[list[int]]:
    """Splits sequences, by index, so that padding each group to its longest costs little; one group keeps their order."""
    if not page_counts:
        return []
    order = sorted(range(len(page_counts)), key=page_counts.__getitem__, reverse=True)
    remaining = sum(page_counts)
    groups: list[list[int]] = [[]]
    longest = page_counts[order[0]]
    for place, i in enumerate(order):
        padding = longest * (len(order) - place) - remaining
        if page_counts[i] * 2 <= longest and padding >= _SPLIT_PAGES:
            groups.append([])
            longest = page_counts[i]
        groups[-1].append(i)
        remaining -= page_counts[i]
    return groups if len(groups) > 1 else [list(range(len(page_counts)))]
