"""From logits to tokens, a whole batch at a time.

Order, as in the field: what may come (biases, allowed tokens, grammars, bad words, and stop ids before min_tokens),
penalties, temperature, min-p and top-k, top-p, draw. Greedy rows take the largest of the penalised logits; where all are
plain greedy, nothing else is computed.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from tllm_core.contracts.messages import TokenLogprobs
from tllm_core.engines.tp.draws import Draws, Workspace, is_drawn
from tllm_core.engines.tp.guided.masks import GuidedRows
from tllm_core.engines.tp.logprobs import token_logprobs
from tllm_core.engines.tp.offsets import OffsetRows, Offsets
from tllm_core.engines.tp.penalties import Penalties, is_penalised
from tllm_core.engines.tp.sequence import Sequence

FAILED = -1
"""In place of a token where a row of logits has no finite maximum, or any NaN."""
EMPTY = -2
"""In place of a token where what the request allows leaves none."""


class Sampled(NamedTuple):
    """One token per row, or FAILED or EMPTY; and its logprobs, where any row wants them or is ranked by them."""

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
        """logits: float32 [rows, vocab], row by row those of `sequences`, which are changed.

        Each sequence must get its token appended before the next call, or not come again.
        """
        rows = self._rows
        if rows.steps_left == 0 or sequences != self._sequences:
            rows = self._rows = _Rows(sequences, logits.shape[1], self._device)
            self._sequences = sequences
        raw = rows.raw(logits)
        rows.adjust(logits)
        best, tokens = largest(logits)
        if rows.draws is not None:
            tokens = rows.draws.into(tokens, logits, best, self._workspace)
        tokens = torch.where(torch.isfinite(best), tokens, rows.failures(best))
        rows.advance(tokens)
        sampled = Sampled(tokens.tolist(), None if raw is None else rows.logprobs(raw, tokens))
        rows.follow(sampled)
        return sampled

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
    """What a batch's sequences ask for, by row; each part is None, or has no rows, where nobody does.

    steps_left: for how many steps it holds, -1 = as long as the sequences stay.
    """

    def __init__(self, sequences: list[Sequence], vocab: int, device: torch.device) -> None:
        params = [sequence.sampling for sequence in sequences]
        self._device = device
        self._told = [row for row, p in enumerate(params) if p.logprobs is not None or p.sequences > p.n]
        self._tops = [params[row].logprobs or 0 for row in self._told]
        self._penalties: Penalties | None = None
        self.draws: Draws | None = None
        self._held, self.steps_left = _held_back(sequences, vocab, device)
        self._take_rules(sequences, vocab)
        if penalised := [row for row, sampling in enumerate(params) if is_penalised(sampling)]:
            self._penalties = Penalties(penalised, sequences, vocab, device)
            self.steps_left = (
                self._penalties.room if self.steps_left < 0 else min(self.steps_left, self._penalties.room)
            )
        if drawn := [row for row, sampling in enumerate(params) if is_drawn(sampling)]:
            self.draws = Draws(drawn, sequences, device)

    def _take_rules(self, sequences: list[Sequence], vocab: int) -> None:
        ruled = [(row, sequence.rules) for row, sequence in enumerate(sequences) if sequence.rules is not None]
        offsets = [(row, rules.offsets) for row, rules in ruled if rules.offsets is not None]
        guides = [(row, rules.guide) for row, rules in ruled if rules.guide is not None]
        self._offsets = OffsetRows(offsets) if offsets else None
        self._guided = GuidedRows(guides, vocab, self._device) if guides else None
        self._bad = [(row, rules.bad, sequences[row]) for row, rules in ruled if rules.bad is not None]
        self._adjusts = bool(ruled) or self._held is not None

    def raw(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The logits of the rows whose logprobs are told, as they are before anything is done to them."""
        rows = self._told
        if not rows:
            return None
        if len(rows) < len(logits):
            return logits[rows]
        return logits.clone() if self._adjusts or self._penalties is not None else logits

    def adjust(self, logits: torch.Tensor) -> None:
        """Excludes what may not come, and penalises, in place."""
        if self._offsets is not None:
            self._offsets.add_to(logits)
        if self._guided is not None:
            self._guided.add_to(logits)
        if self._bad:
            self._exclude_runs(logits)
        if self._held is not None:
            self._held.add_to(logits)
        if self._penalties is not None:
            self._penalties.apply(logits)

    def _exclude_runs(self, logits: torch.Tensor) -> None:
        found = [(row, ids) for row, bad, s in self._bad for ids in bad.banned(s.token_ids, s.prompt_len)]
        if found:
            rows = np.repeat([row for row, _ in found], [len(ids) for _, ids in found])
            tokens = np.concatenate([ids for _, ids in found])
            places = torch.from_numpy(np.stack((rows, tokens))).to(self._device)
            logits[places[0], places[1]] += -math.inf  # added, so that NaN is still seen

    def failures(self, best: torch.Tensor) -> torch.Tensor | int:
        """What stands for a token in rows without any: [rows], or one for all. best: [rows] the largest of each row."""
        if not self._adjusts:
            return FAILED
        return torch.where(best == -math.inf, EMPTY, FAILED)

    def advance(self, tokens: torch.Tensor) -> None:
        """Counts the tokens that were sampled."""
        self.steps_left -= self.steps_left > 0
        if self._penalties is not None:
            self._penalties.count(tokens)
        if self.draws is not None:
            self.draws.advance()

    def follow(self, sampled: Sampled) -> None:
        """Moves the grammars on."""
        if self._guided is not None:
            self._guided.follow(sampled.token_ids)

    def logprobs(self, raw: torch.Tensor, tokens: torch.Tensor) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        rows, tokens = self._told, tokens.clamp(min=0)
        if len(rows) < len(tokens):
            tokens = tokens[rows]
        for row, entries in zip(rows, token_logprobs(raw, tokens, self._tops), strict=True):
            found[row] = entries
        return found


def _held_back(sequences: list[Sequence], vocab: int, device: torch.device) -> tuple[OffsetRows | None, int]:
    """The stop ids that can't come yet, and for how many steps that stays so (-1 = for ever)."""
    left = [sequence.min_len - len(sequence.token_ids) if sequence.stop_ids else 0 for sequence in sequences]
    rows = [row for row, more in enumerate(left) if more > 0]
    if not rows:
        return None, -1
    # Those of a request's sequences are one object, and may be the whole vocabulary.
    sets = {id(sequences[row].stop_ids): sequences[row].stop_ids for row in rows}
    offsets = {key: Offsets.without(stop_ids, vocab, device) for key, stop_ids in sets.items()}
    held = OffsetRows([(row, offsets[id(sequences[row].stop_ids)]) for row in rows])
    return held, min(left[row] for row in rows)
