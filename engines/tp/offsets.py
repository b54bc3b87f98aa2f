"""What is added to the same logits in every step: biases, and minus infinity for what may never come."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tllm_core.contracts.messages import SamplingParams

_SPARSE = 512
"""Tokens up to which adding to them alone is cheaper than adding to the whole row."""


class Offsets(NamedTuple):
    """Of one request. Either `ids` int64 and `values` float32, [tokens] each; or `row`, float32 [vocab], where many."""

    ids: torch.Tensor | None
    values: torch.Tensor | None
    row: torch.Tensor | None

    @classmethod
    def of(cls, sampling: SamplingParams, vocab: int, device: torch.device) -> Offsets | None:
        """None where a request has none. Token ids are below `vocab`."""
        singles = [run[0] for run in sampling.bad_token_sequences if len(run) == 1]
        if sampling.allowed_token_ids is None and not sampling.logit_bias and not singles:
            return None
        if sampling.allowed_token_ids is None:
            added = np.zeros(vocab, dtype=np.float32)
        else:
            added = np.full(vocab, -math.inf, dtype=np.float32)
            added[np.array(sampling.allowed_token_ids, dtype=np.int64)] = 0
        if sampling.logit_bias:
            ids, bias = zip(*sampling.logit_bias, strict=True)
            added[np.array(ids, dtype=np.int64)] += np.array(bias, dtype=np.float32)
        added[np.array(singles, dtype=np.int64)] = -math.inf
        return cls._of(added, device)

    @classmethod
    def without(cls, token_ids: Collection[int], vocab: int, device: torch.device) -> Offsets:
        """None of `token_ids`, which are below `vocab`, may come."""
        added = np.zeros(vocab, dtype=np.float32)
        added[np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))] = -math.inf
        return cls._of(added, device)

    @classmethod
    def _of(cls, added: npt.NDArray[np.float32], device: torch.device) -> Offsets:
        touched = added.nonzero()[0]
        if len(touched) > _SPARSE:
            return cls(None, None, torch.from_numpy(added).to(device))
        return cls(torch.from_numpy(touched).to(device), torch.from_numpy(added[touched]).to(device), None)


class OffsetRows:
    """The offsets of a batch's rows, in as few additions as there are requests with many, and one for all others."""

    def __init__(self, rows: AbstractSequence[tuple[int, Offsets]]) -> None:
        self._dense = [(row, offsets.row) for row, offsets in rows if offsets.row is not None]
        few = [(row, offsets.ids, offsets.values) for row, offsets in rows if offsets.ids is not None]
        self._sparse: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if few:
            ids = torch.cat([ids for _, ids, _ in few])
            counts = torch.tensor([len(ids) for _, ids, _ in few])
            each = torch.tensor([row for row, _, _ in few]).repeat_interleave(counts).to(ids.device)
            self._sparse = (each, ids, torch.cat([values for _, _, values in few if values is not None]))

    def add_to(self, logits: torch.Tensor) -> None:
        """In place. logits: [batch rows, vocab]."""
        if self._sparse is not None:
            rows, ids, values = self._sparse
            logits[rows, ids] += values  # no token is there twice
        for row, added in self._dense:
            logits[row].add_(added)
