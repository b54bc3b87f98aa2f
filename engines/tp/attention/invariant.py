"""Attention whose bits do not depend on the batch, on chunks, or on what was computed before.

A token at position p is always row p % ROWS of a block of ROWS queries, and keys are taken in blocks of KEYS from
position 0 on, so that every product has the same shape and every sum the same order. A block of keys that a row does not
see changes none of its bits. Slow: for tests, and for results that must be repeatable to the bit.
"""

from dataclasses import dataclass

import torch

from tllm_core.engines.tp.attention.metadata import AttentionMetadata
from tllm_core.engines.tp.attention.torch import TorchAttention
from tllm_core.engines.tp.invariant import ROWS

KEYS = 256
_LOWEST = -1e30
"""Below every score, and finite: a row that has seen no key yet must not become NaN."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one sequence in one block of positions.

    rows: [tokens] where they are in the batch. places: [tokens] their rows in the block. positions: [ROWS], those of rows
    without a token repeat one that has. pages: [pages] of the sequence's cache, up to the end of a block of keys.
    """

    rows: slice
    places: slice
    positions: torch.Tensor
    pages: torch.Tensor


class InvariantAttention(TorchAttention):
    """The same cache as TorchAttention's."""

    def plan(self, metadata: AttentionMetadata) -> None:
        device = self.cache.device
        self._slots = metadata.slot_mapping.to(device, torch.int64)
        self._invariant_pieces: list[_Piece] = []
        starts, kv_starts = metadata.qo_indptr.tolist(), metadata.kv_indptr.tolist()
        for sequence, seq_len in enumerate(metadata.seq_lens.tolist()):
            start, stop = starts[sequence : sequence + 2]
            pages = metadata.kv_indices[kv_starts[sequence] : kv_starts[sequence + 1]].to(device, torch.int64)
            position = seq_len - (stop - start)
            while start < stop:
                count = min(ROWS - position % ROWS, stop - start)
                self._invariant_pieces.append(_piece(start, count, position, pages, metadata.block_size))
                start, position = start + count, position + count

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        for piece in self._invariant_pieces:
            block = q.new_zeros(ROWS, *q.shape[1:])
            block[piece.places] = q[piece.rows]
            out[piece.rows] = self._attend(layer, block, piece)[piece.places]
        return out.flatten(1)

    def _attend(self, layer: int, q: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """q: [ROWS, heads, head_dim]; the same shape, in q's type."""
        heads, head_dim = q.shape[1:]
        kv_heads = self.cache.shape[4]
        scale = head_dim**-0.5 if self._scale is None else self._scale
        queries = q.float().mul_(scale).view(ROWS, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, -1, head_dim)  # [kv_heads, group * ROWS, head_dim]
        best = queries.new_full((*queries.shape[:2], 1), _LOWEST)
        total, mixed = torch.zeros_like(best), torch.zeros_like(queries)
        per_block = KEYS // self.cache.shape[3]
        for number in range(-(-len(piece.pages) // per_block)):
            pages = piece.pages[number * per_block : (number + 1) * per_block]
            keys, values = (self._block(layer, kind, pages, per_block) for kind in (0, 1))
            scores = torch.bmm(queries, keys.transpose(1, 2))
            scores.masked_fill_(self._unseen(layer, piece, number, heads // kv_heads), -torch.inf)
            top = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
            weights, kept = scores.sub_(top).exp_(), best.sub_(top).exp_()
            total.mul_(kept).add_(weights.sum(dim=-1, keepdim=True))
            mixed.mul_(kept).add_(torch.bmm(weights, values))
            best = top
        mixed.div_(total)
        return mixed.view(heads, ROWS, head_dim).transpose(0, 1).to(q.dtype)

    def _block(self, layer: int, kind: int, pages: torch.Tensor, count: int) -> torch.Tensor:
        """float32 [kv_heads, KEYS, head_dim]: keys (0) or values (1) of `pages`, zeros behind them."""
        found = self.cache[layer, kind].index_select(0, pages)
        block = found.new_zeros(count, *found.shape[1:], dtype=torch.float32)
        block[: len(pages)] = found
        return block.flatten(0, 1).transpose(0, 1).contiguous()

    def _unseen(self, layer: int, piece: _Piece, number: int, group: int) -> torch.Tensor:
        """bool [group * ROWS, KEYS]."""
        keys = torch.arange(number * KEYS, (number + 1) * KEYS, device=self.cache.device)
        own, window = piece.positions.unsqueeze(1), self._windows[layer]
        unseen = keys > own if window is None else (keys > own) | (keys <= own - window)
        return unseen.repeat(group, 1)


def _piece(start: int, count: int, position: int, pages: torch.Tensor, block_size: int) -> _Piece:
    first = position % ROWS
    last = position + count - 1
    positions = torch.arange(position - first, position - first + ROWS, device=pages.device).clamp_(position, last)
    return _Piece(
        rows=slice(start, start + count),
        places=slice(first, first + count),
        positions=positions,
        pages=pages[: last // block_size + 1],
    )
