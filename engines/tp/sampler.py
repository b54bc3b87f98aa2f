"""From logits to tokens, a whole batch at a time.

Order, as in the field: min_tokens (its stop ids can't come), penalties, temperature, min-p and top-k, top-p, draw. A filter keeps
every token that is as likely as the last one it must keep, so that ties never depend on how something was sorted. A draw
is the inverse of the distribution function, in the order of the vocabulary, at a number that depends on the sequence's
seed, index and output position alone: not on neighbours, row or preemption.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from tllm_core.contracts.messages import SamplingParams, TokenLogprobs
from tllm_core.engines.tp.logprobs import token_logprobs
from tllm_core.engines.tp.random import uniforms
from tllm_core.engines.tp.sequence import Sequence

FAILED = -1
"""In place of a token where a row of logits has no finite maximum, or any NaN."""

_NUCLEUS_WIDTHS = (128, 4096)
"""How many of the likeliest tokens are looked at for top-p, before all are."""


class Sampled(NamedTuple):
    """One token per row, or FAILED; and its logprobs, where any row wants them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


class Sampler:
    """Keeps the parameters of the last batch as tensors for as long as the same sequences come in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sequences: list[Sequence] = []
        self._rows = _Rows([], 0, device)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
        """logits: float32 [rows, vocab], row by row those of `sequences`; they are not changed."""
        rows = self._rows
        if rows.steps_left == 0 or sequences != self._sequences:
            rows = self._rows = _Rows(sequences, logits.shape[1], self._device)
            self._sequences = sequences
        adjusted = rows.adjust(logits)
        best = adjusted.max(dim=-1)
        tokens = best.indices
        if rows.draws is not None:
            tokens = rows.draws.into(tokens, adjusted, best.values)
        tokens = torch.where(torch.isfinite(best.values), tokens, FAILED)
        rows.advance(tokens)
        return Sampled(tokens.tolist(), rows.logprobs(logits, tokens))

    def forget(self) -> None:
        """Lets go of the last batch's sequences."""
        self._sequences, self._rows = [], _Rows([], 0, self._device)


class _Rows:
    """What a batch's sequences ask for, by row; each part is None where nobody does.

    steps_left: for how many steps it holds, -1 = as long as the sequences stay.
    """

    def __init__(self, sequences: list[Sequence], vocab: int, device: torch.device) -> None:
        params = [sequence.sampling for sequence in sequences]
        self._logprob_rows = [row for row, sampling in enumerate(params) if sampling.logprobs is not None]
        self._tops = [params[row].logprobs or 0 for row in self._logprob_rows]
        self._penalties: _Penalties | None = None
        self.draws: _Draws | None = None
        self._hold(sequences, device)
        if penalised := [row for row, sampling in enumerate(params) if _is_penalised(sampling)]:
            self._penalties = _Penalties(penalised, sequences, vocab, device)
        if drawn := [row for row, sampling in enumerate(params) if sampling.temperature > 0]:
            self.draws = _Draws(drawn, sequences, device)

    def _hold(self, sequences: list[Sequence], device: torch.device) -> None:
        """Which token ids can't come yet in which rows."""
        left = [sequence.min_len - len(sequence.token_ids) if sequence.stop_ids else 0 for sequence in sequences]
        held = [(row, token) for row, more in enumerate(left) if more > 0 for token in sequences[row].stop_ids]
        self._held = torch.tensor(held, device=device).T if held else None
        self.steps_left = min([more for more in left if more > 0], default=-1)

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with what may not come masked, and penalised: a copy if anything is done."""
        if self._held is None and self._penalties is None:
            return logits
        logits = logits.clone()
        if self._held is not None:
            logits[self._held[0], self._held[1]] = -math.inf
        if self._penalties is not None:
            self._penalties.apply(logits)
        return logits

    def advance(self, tokens: torch.Tensor) -> None:
        """Counts the tokens that were sampled."""
        self.steps_left -= self.steps_left > 0
        if self._penalties is not None:
            self._penalties.count(tokens)
        if self.draws is not None:
            self.draws.advance()

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> list[TokenLogprobs | None] | None:
        rows = self._logprob_rows
        if not rows:
            return None
        found: list[TokenLogprobs | None] = [None] * len(logits)
        tokens = tokens.clamp(min=0)
        if len(rows) < len(logits):
            logits, tokens = logits[rows], tokens[rows]
        for row, entries in zip(rows, token_logprobs(logits, tokens, self._tops), strict=True):
            found[row] = entries
        return found


def _is_penalised(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class _Penalties:
    """Repetition (prompt and output), then frequency and presence (output): [penalised rows, vocab]."""

    def __init__(self, rows: list[int], sequences: list[Sequence], vocab: int, device: torch.device) -> None:
        params = [sequences[row].sampling for row in rows]
        self._rows = torch.tensor(rows, device=device)
        self._repetition = _column([sampling.repetition_penalty for sampling in params], device)
        self._frequency = _column([sampling.frequency_penalty for sampling in params], device)
        self._presence = _column([sampling.presence_penalty for sampling in params], device)
        self._each = torch.arange(len(rows), device=device)
        self._counts = torch.stack([_counted(sequences[row], vocab) for row in rows]).to(device)
        self._seen = torch.stack([_seen(sequences[row], vocab) for row in rows]).to(device)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalises its rows of `logits` in place."""
        raw = logits[self._rows]
        repeated = torch.where(raw > 0, raw / self._repetition, raw * self._repetition)
        raw = torch.where(self._seen, repeated, raw)
        raw -= self._frequency * self._counts
        raw -= self._presence * (self._counts > 0)
        logits[self._rows] = raw

    def count(self, tokens: torch.Tensor) -> None:
        mine = tokens[self._rows].clamp(min=0)
        self._counts[self._each, mine] += 1
        self._seen[self._each, mine] = True


def _counted(sequence: Sequence, vocab: int) -> torch.Tensor:
    output = np.array(sequence.token_ids[sequence.prompt_len :], dtype=np.int64)
    return torch.from_numpy(np.bincount(output, minlength=vocab).astype(np.float32))


def _seen(sequence: Sequence, vocab: int) -> torch.Tensor:
    seen = torch.zeros(vocab, dtype=torch.bool)
    seen[torch.from_numpy(np.array(sequence.token_ids, dtype=np.int64))] = True
    return seen


class _Draws:
    """The rows that are drawn at random, with their filters: columns [drawn rows, 1]."""

    def __init__(self, rows: list[int], sequences: list[Sequence], device: torch.device) -> None:
        drawn = [sequences[row] for row in rows]
        params = [sequence.sampling for sequence in drawn]
        self._device = device
        self._rows = torch.tensor(rows, device=device) if len(rows) < len(sequences) else None
        self._seeds = np.array([sequence.seed for sequence in drawn], dtype=np.uint64)
        self._indexes = np.array([sequence.index for sequence in drawn], dtype=np.uint64)
        self._positions = np.array([sequence.generated for sequence in drawn], dtype=np.uint64)
        self._temperature = _column([sampling.temperature for sampling in params], device)
        self._likeliest = _Likeliest.of(params, device)
        self._nucleus = _Nucleus.of(params, device)

    def into(self, tokens: torch.Tensor, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """`tokens` with a drawn one in each of its rows. best: [rows] the largest of each row of `logits`."""
        if self._rows is None:
            return self._draw(logits, best)
        return tokens.index_copy(0, self._rows, self._draw(logits[self._rows], best[self._rows]))

    def advance(self) -> None:
        self._positions += np.uint64(1)

    def _draw(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        # Relative to the best, so that no temperature overflows.
        scaled = (logits - best.unsqueeze(1)).div_(self._temperature)
        if self._likeliest is not None:
            scaled.masked_fill_(scaled < self._likeliest.floor(scaled), -math.inf)
        # softmax and cumsum work row by row: what a row gets doesn't depend on how many there are, as with sum.
        probs = torch.softmax(scaled, dim=-1)
        if self._nucleus is not None:
            probs.masked_fill_(probs < self._nucleus.floor(probs), 0)
        mass = probs.cumsum(dim=-1, dtype=torch.float64)
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
        logs = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in params]
        top_k = torch.tensor([[sampling.top_k] for sampling in params], device=device)
        return cls(top_k, _column(logs, device), width)

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


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
