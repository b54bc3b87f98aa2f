"""Repetition, frequency and presence penalties. Only the tokens that a sequence has seen are touched."""

import numpy as np
import torch

from tllm_core.contracts.messages import SamplingParams
from tllm_core.engines.tp.sequence import Sequence

_ROOM = 64
_MOST = torch.finfo(torch.float32).max
_LEAST_REPETITION = 1e-30
"""A smaller penalty counts as this one: it still keeps the order of all logits below 3e8, and can't become 0 in float32."""


def is_penalised(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class Penalties:
    """The penalised rows of a batch, for `room` steps.

    Repetition is for tokens of prompt and output, frequency and presence for those of the output. No penalty makes a finite
    logit infinite or NaN, so that those are always the model's own. `_ids`, [rows, seen]:
    each row's tokens, some of them more than once; every place of a token is given the same value. `_counts`,
    [rows, vocab]: how often each is in the output.
    """

    room = _ROOM

    def __init__(self, rows: list[int], sequences: list[Sequence], vocab: int, device: torch.device) -> None:
        penalised = [sequences[row] for row in rows]
        params = [sequence.sampling for sequence in penalised]
        self._rows = torch.tensor(rows, device=device)
        self._each = torch.arange(len(rows), device=device)
        self._repetition = _column([max(sampling.repetition_penalty, _LEAST_REPETITION) for sampling in params], device)
        self._frequency = _column([sampling.frequency_penalty for sampling in params], device)
        self._presence = _column([sampling.presence_penalty for sampling in params], device)
        self._counts = torch.stack([_counted(sequence, vocab) for sequence in penalised]).to(device)
        seen = [np.unique(np.array(sequence.token_ids, dtype=np.int64)) for sequence in penalised]
        self._next = max(map(len, seen))
        ids = [np.pad(tokens, (0, self._next + self.room - len(tokens)), mode="edge") for tokens in seen]
        self._ids = torch.from_numpy(np.stack(ids)).to(device)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalises its rows of `logits`, [batch rows, vocab], in place."""
        columns = self._ids[:, : self._next]
        rows = self._rows.unsqueeze(1)
        raw, counts = logits[rows, columns], self._counts.gather(1, columns)
        value = torch.where(raw > 0, raw / self._repetition, raw * self._repetition)
        value -= self._frequency * counts
        value -= self._presence * (counts > 0)
        logits[rows, columns] = torch.where(raw.isfinite(), value.clamp_(-_MOST, _MOST), raw)

    def count(self, tokens: torch.Tensor) -> None:
        """tokens: [batch rows], what was sampled."""
        mine = tokens[self._rows].clamp(min=0)
        self._counts[self._each, mine] += 1
        self._ids[:, self._next] = mine
        self._next += 1


def _counted(sequence: Sequence, vocab: int) -> torch.Tensor:
    output = np.array(sequence.token_ids[sequence.prompt_len :], dtype=np.int64)
    return torch.from_numpy(np.bincount(output, minlength=vocab).astype(np.float32))


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
