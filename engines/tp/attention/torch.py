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
class _Gather:
    """pages: [sequences * pages of each], copied to `into` [sequences * pages of each, a block's keys and values]; k, v: views
    of that, [sequences, kv_heads, keys, head_dim] each. All of a step share the memory."""

    pages: torch.Tensor
    into: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length. rows: [size] their tokens, None = all decoding tokens in order.

    gather: of all keys that are computed with, from each sequence's first page on. mask: None where all of them count.
    """

    rows: torch.Tensor | None
    size: int
    gather: _Gather
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A piece of a prompt: tokens start:end of the batch. gather: of all its keys, None where it has no context.

    pieces: per `_PIECE_ROWS` tokens where they start and end in the batch, the first key that any of them sees, and their
    mask [rows, keys from that one on].
    """

    start: int
    end: int
    gather: _Gather | None
    pieces: list[tuple[int, int, int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One step for all layers of the same window."""

    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchAttention(AttentionBackend):
    """`cache`: [layers, 2, num_blocks, block_size, kv_heads, head_dim], keys at 0 and values at 1 of the second axis.

    In memory a token's values follow its keys, so that one copy stores both and one gathers both.
    """

    def __init__(self, shape: AttentionShape) -> None:
        blocks = (shape.num_blocks, shape.block_size, 2, shape.num_kv_heads, shape.head_dim)
        # Zeros, not empty: rows that were never written are multiplied by a weight of zero, and NaN * 0 is NaN.
        layers = _zeros((shape.num_layers, *blocks), shape.dtype, shape.device)
        self.cache = layers.permute(0, 3, 1, 2, 4, 5)
        self._rows = [layer.view(shape.num_blocks * shape.block_size, -1, shape.head_dim) for layer in layers]
        self._pages = [layer.view(shape.num_blocks, -1) for layer in layers]
        self._buffer = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self._new_kv = self._buffer
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

    def write_kv(self, layer: int, kv: torch.Tensor) -> None:
        self._rows[layer].index_copy_(0, self._slots, kv)
        self._new_kv = kv

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
            gather=self._plan_gather(pages, longest),
            mask=mask,
        )

    def _plan_chunk(self, metadata: AttentionMetadata, i: int, window: int | None) -> _Chunk:
        start, end = metadata.qo_indptr[i : i + 2].tolist()
        seq_len = int(metadata.seq_lens[i])
        context, gather, base = seq_len - (end - start), None, 0
        if context:
            skipped = 0 if window is None else max(0, context + 1 - window) // metadata.block_size
            first, last = metadata.kv_indptr[i : i + 2].tolist()
            base = skipped * metadata.block_size
            gather = self._plan_gather(metadata.kv_indices[first + skipped : last].unsqueeze(0), seq_len - base)
        pieces = []
        for top in range(start, end, _PIECE_ROWS):
            bottom = min(top + _PIECE_ROWS, end)
            low = base if window is None else max(base, context + (top - start) + 1 - window)
            own = metadata.positions[top:bottom].unsqueeze(1)
            keys = torch.arange(low, context + (bottom - start))
            unseen = keys > own if window is None else (keys > own) | (keys <= own - window)
            mask = torch.zeros(unseen.shape, dtype=self.cache.dtype).masked_fill_(unseen, float("-inf"))
            pieces.append((top, bottom, low - base, mask.to(self.cache.device)))
        return _Chunk(start, end, gather, pieces)

    # --------------------------------------------------------------------------------------------------- run

    def _decode(self, layer: int, q: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        k, v = self._gather(layer, group.gather)
        grouped = q.view(group.size, k.shape[1], -1, k.shape[3])
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=self._scale)
        return mixed.reshape(group.size, -1)

    def _prefill(self, layer: int, q: torch.Tensor, chunk: _Chunk, out: torch.Tensor) -> None:
        if chunk.gather is None:
            k, v = self._new_kv[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        else:
            k, v = self._gather(layer, chunk.gather)
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

    def _plan_gather(self, pages: torch.Tensor, length: int) -> _Gather:
        """pages: [sequences, pages of each], of which the first `length` tokens are wanted."""
        places, width = pages.numel(), self._pages[0].shape[1]
        if self._buffer.numel() < places * width:
            self._buffer = self._buffer.new_empty(2 * places * width)
        into = self._buffer[: places * width].view(places, width)
        kv_heads, head_dim = self.cache.shape[4:]
        both = into.view(pages.shape[0], -1, 2 * kv_heads, head_dim)[:, :length].transpose(1, 2)
        return _Gather(pages.flatten().to(self.cache.device), into, *both.chunk(2, dim=1))

    def _gather(self, layer: int, wanted: _Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [sequences, kv_heads, keys, head_dim] each; the next call overwrites them."""
        torch.index_select(self._pages[layer], 0, wanted.pages, out=wanted.into)
        return wanted.k, wanted.v


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
