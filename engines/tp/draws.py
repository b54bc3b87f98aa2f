"""Random draws from filtered logits.

A filter keeps every token that is as likely as the last one it must keep, so that ties never depend on how something was
sorted. A draw is the inverse of the distribution function, in the order of the vocabulary, at a number that depends on the
sequence's seed, index and output position alone. Everything is computed row by row: a sequence gets the same tokens in
whatever row of whatever batch, and after a preemption.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from tllm_core.contracts.messages import SamplingParams
from tllm_core.engines.tp.random import uniforms
from tllm_core.engines.tp.sequence import Sequence

_NUCLEUS_WIDTHS = (128, 4096)
"""How many of the likeliest tokens are looked at for top-p, before all are."""

_COLDEST = torch.finfo(torch.float32).tiny
"""Below it, what is divided by a temperature may be divided by 0."""


def is_drawn(sampling: SamplingParams) -> bool:
    """Else the likeliest token is taken, which is also what a draw comes to as the temperature falls."""
    return sampling.temperature >= _COLDEST


class Workspace:
    """Memory that is used again in every step: fresh pages cost more than the arithmetic in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 0

    def take(self, rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Two float32 and one float64 [rows, vocab], uninitialised; valid until the next call."""
        size = rows * vocab
        if size > self._size:
            self._size = size
            self._scaled, self._probs = torch.empty(2, size, device=self._device)
            self._mass = torch.empty(size, dtype=torch.float64, device=self._device)
        shape = (rows, vocab)
        return self._scaled[:size].view(shape), self._probs[:size].view(shape), self._mass[:size].view(shape)


class Draws:
    """The rows of a batch that are drawn at random, with their filters: columns [drawn rows, 1]."""

    def __init__(self, rows: list[int], sequences: list[Sequence], device: torch.device) -> None:
        drawn = [sequences[row] for row in rows]
        params = [sequence.sampling for sequence in drawn]
        self._device = device
        self._rows = torch.tensor(rows, device=device) if len(rows) < len(sequences) else None
        self._seeds = np.array([sequence.seed for sequence in drawn], dtype=np.uint64)
        self._indexes = np.array([sequence.index for sequence in drawn], dtype=np.uint64)
        self._positions = np.array([sequence.generated for sequence in drawn], dtype=np.uint64)
        self._temperature = torch.tensor([[sampling.temperature] for sampling in params], device=device)
        self._likeliest = _Likeliest.of(params, device)
        self._nucleus = _Nucleus.of(params, device)

    def into(
        self, tokens: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, workspace: Workspace
    ) -> torch.Tensor:
        """`tokens` with a drawn one in each of its rows. best: [rows] the largest of each row of `logits`."""
        if self._rows is None:
            return self._draw(logits, best, workspace)
        return tokens.index_copy(0, self._rows, self._draw(logits[self._rows], best[self._rows], workspace))

    def advance(self) -> None:
        self._positions += np.uint64(1)

    def _draw(self, logits: torch.Tensor, best: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        scaled, probs, mass = workspace.take(*logits.shape)
        # Relative to the best, so that no temperature overflows.
        torch.sub(logits, best.unsqueeze(1), out=scaled).div_(self._temperature)
        if self._likeliest is not None:
            scaled.masked_fill_(scaled < self._likeliest.floor(scaled), -math.inf)
        # softmax and cumsum give a row the same bits however many rows there are; a sum does not.
        torch.softmax(scaled, dim=-1, out=probs)
        if self._nucleus is not None:
            probs.masked_fill_(probs < self._nucleus.floor(probs), 0)
        torch.cumsum(probs, dim=-1, dtype=torch.float64, out=mass)
        numbers = torch.from_numpy(uniforms(self._seeds, self._indexes, self._positions)).to(self._device)
        drawn = torch.searchsorted(mass, mass[:, -1:] * numbers.unsqueeze(1), right=True).squeeze(1)
        return drawn.clamp_(max=logits.shape[1] - 1)  # only a row of NaN finds nothing


class _Likeliest(NamedTuple):
    """top-k and min-p: top_k, int64 [rows, 1], 0 = off; log_min_p [rows, 1], -inf = off; width: the largest top_k."""

    top_k: torch.Tensor
    log_min_p: torch.Tensor
    width: int

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> _Likeliest | None:
        width = max(sampling.top_k for sampling in params)
        if width == 0 and all(sampling.min_p == 0 for sampling in params):
            return None
        logs = [[math.log(sampling.min_p) if sampling.min_p else -math.inf] for sampling in params]
        top_k = torch.tensor([[sampling.top_k] for sampling in params], device=device)
        return cls(top_k, torch.tensor(logs, device=device), width)

    def floor(self, scaled: torch.Tensor) -> torch.Tensor:
        """[rows, 1]: what is below is left out. scaled: [rows, vocab] logits with their largest at 0."""
        if self.width == 0:
            return self.log_min_p
        width = min(self.width, scaled.shape[1])
        values = scaled.topk(width, dim=-1).values
        last = values.gather(1, self.top_k.clamp(1, width) - 1)
        last = last.masked_fill(self.top_k == 0, -math.inf)
        return torch.maximum(last, self.log_min_p)


class _Nucleus(NamedTuple):
    """top-p: top_p float64 [rows, 1], 0 where off; off: bool [rows, 1]."""

    top_p: torch.Tensor
    off: torch.Tensor

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> _Nucleus | None:
        if all(sampling.top_p == 1 for sampling in params):
            return None
        top_p = torch.tensor([[sampling.top_p] for sampling in params], dtype=torch.float64, device=device)
        off = top_p == 1
        return cls(top_p.masked_fill(off, 0), off)

    def floor(self, probs: torch.Tensor) -> torch.Tensor:
        """[rows, 1]: the probability of the last token that is needed to reach top_p."""
        vocab = probs.shape[1]
        for width in (*_NUCLEUS_WIDTHS, vocab):
            values = probs.topk(min(width, vocab), dim=-1).values
            mass = values.cumsum(dim=-1, dtype=torch.float64)
            short = (mass < self.top_p).sum(dim=-1, keepdim=True)
            if width >= vocab or int(short.max()) < width:
                break
        last = values.gather(1, short.clamp(max=values.shape[1] - 1))
        return last.masked_fill(self.off, 0)
