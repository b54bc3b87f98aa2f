"""The bitmasks of a batch's guided rows, as something to add to their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.guided.guide import Guide


class GuidedRows:
    """The guides of a batch, and the rows of the logits that are theirs."""

    def __init__(self, rows: AbstractSequence[tuple[int, Guide]], vocab: int, device: torch.device) -> None:
        self._guides = [guide for _, guide in rows]
        self._places = [row for row, _ in rows]
        self._rows = torch.tensor(self._places, device=device)
        self._vocab, self._device = vocab, device
        self._masks = np.zeros((len(rows), -(-vocab // 32)), dtype=np.uint32)
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._table = torch.from_numpy(np.where(bits, 0, -math.inf).astype(np.float32)).to(device)

    def add_to(self, logits: torch.Tensor) -> None:
        """Minus infinity for what may not come, in place; NaN stays NaN, so that broken rows are still seen as such."""
        for guide, mask in zip(self._guides, self._masks, strict=True):
            guide.fill(mask)
        octets = torch.from_numpy(self._masks.view(np.uint8)).to(self._device).int()
        added = F.embedding(octets, self._table).flatten(1)[:, : self._vocab]
        logits.index_add_(0, self._rows, added)

    def follow(self, tokens: list[int]) -> None:
        """tokens: [batch rows], what was sampled; below 0 = nothing was."""
        for row, guide in zip(self._places, self._guides, strict=True):
            if tokens[row] >= 0:
                guide.follow(tokens[row])
