"""From logits to tokens, a whole batch at a time.

Order, as in the field: min_tokens (its stop ids can't come), penalties, temperature, min-p and top-k, top-p, draw. Greedy rows
take the largest of the penalised logits; where all are plain greedy, nothing else is computed.
"""

import math
from typing import NamedTuple

import torch

from tllm_core.contracts.messages import TokenLogprobs
from tllm_core.engines.tp.draws import Draws, Workspace
from tllm_core.engines.tp.logprobs import token_logprobs
from tllm_core.engines.tp.penalties import Penalties, is_penalised
from tllm_core.engines.tp.sequence import Sequence

FAILED = -1
"""In place of a token where a row of logits has no finite maximum, or any NaN."""


class Sampled(NamedTuple):
    """One token per row, or FAILED; and its logprobs, where any row wants them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


class Sampler:
    """Keeps the parameters of the last batch as tensors for as long as the same sequences come in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace = Workspace(device)
        self._sequences: list[Sequence] = []
        self._rows = _Rows([], 0, device)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
        """logits: float32 [rows, vocab], row by row those of `sequences`; what is in them afterwards is undefined.

        Each sequence must get its token appended before the next call, or not come again.
        """
        rows = self._rows
        if rows.steps_left == 0 or sequences != self._sequences:
            rows = self._rows = _Rows(sequences, logits.shape[1], self._device)
            self._sequences = sequences
        adjusted = rows.adjust(logits)
        best, tokens = largest(adjusted)
        if rows.draws is not None:
            tokens = rows.draws.into(tokens, adjusted, best, self._workspace)
        tokens = torch.where(torch.isfinite(best), tokens, FAILED)
        rows.advance(tokens)
        return Sampled(tokens.tolist(), rows.logprobs(logits, tokens))

    def forget(self) -> None:
        """Lets go of the last batch's sequences."""
        self._sequences, self._rows = [], _Rows([], 0, self._device)


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and index [rows] of each row's largest; the first where several are equal; NaN where any is."""
    rows, vocab = logits.shape
    width = next((width for width in (256, 128, 64) if vocab % width == 0), vocab)
    if width == vocab:
        best = logits.max(dim=-1)
        return best.values, best.indices
    # torch's argmax is scalar code on a CPU and amax is not: the best block first is ten times faster.
    blocks = logits.view(rows, -1, width)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    best = blocks[torch.arange(rows, device=logits.device), block].max(dim=-1)
    return best.values, block * width + best.indices


class _Rows:
    """What a batch's sequences ask for, by row; each part is None where nobody does.

    steps_left: for how many steps it holds, -1 = as long as the sequences stay.
    """

    def __init__(self, sequences: list[Sequence], vocab: int, device: torch.device) -> None:
        params = [sequence.sampling for sequence in sequences]
        self._logprob_rows = [row for row, sampling in enumerate(params) if sampling.logprobs is not None]
        self._tops = [params[row].logprobs or 0 for row in self._logprob_rows]
        self._penalties: Penalties | None = None
        self.draws: Draws | None = None
        self._held, self.steps_left = _held_back(sequences, device)
        if penalised := [row for row, sampling in enumerate(params) if is_penalised(sampling)]:
            self._penalties = Penalties(penalised, sequences, vocab, device)
            self.steps_left = (
                self._penalties.room if self.steps_left < 0 else min(self.steps_left, self._penalties.room)
            )
        if drawn := [row for row, sampling in enumerate(params) if sampling.temperature > 0]:
            self.draws = Draws(drawn, sequences, device)

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with what may not come masked, and penalised; the raw ones stay where logprobs need them."""
        if self._held is None and self._penalties is None:
            return logits
        if self._logprob_rows:
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


def _held_back(sequences: list[Sequence], device: torch.device) -> tuple[torch.Tensor | None, int]:
    """[2, held] rows and token ids that can't come yet, and for how many steps that stays so (-1 = for ever)."""
    left = [sequence.min_len - len(sequence.token_ids) if sequence.stop_ids else 0 for sequence in sequences]
    held = [(row, token) for row, more in enumerate(left) if more > 0 for token in sequences[row].stop_ids]
    steps = min([more for more in left if more > 0], default=-1)
    return torch.tensor(held, device=device).T if held else None, steps
