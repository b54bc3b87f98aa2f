"""Which tokens a sequence may have next: what its request says of that, in the form that the sampler needs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tllm_core.contracts.messages import SamplingParams
from tllm_core.engines.tp.bad_words import BadSequences
from tllm_core.engines.tp.guided.guide import Guide
from tllm_core.engines.tp.offsets import Offsets


class Rules(NamedTuple):
    """offsets, bad: of the request, shared by its sequences. guide: the sequence's own place in the request's grammar."""

    offsets: Offsets | None = None
    bad: BadSequences | None = None
    guide: Guide | None = None

    @classmethod
    def of(cls, sampling: SamplingParams, vocab: int, device: torch.device) -> Rules | None:
        """None where every token may come as it is. Guides are added once the grammar is compiled."""
        offsets = Offsets.of(sampling, vocab, device)
        bad = BadSequences.of(sampling.bad_token_sequences)
        return None if offsets is None and bad is None else cls(offsets, bad)

    def guided_by(self, guide: Guide) -> Rules:
        return self._replace(guide=guide)


_LIMITING = ("guided", "allowed_token_ids", "bad_token_sequences", "min_tokens")


def nothing_left(sampling: SamplingParams, position: int) -> tuple[str, str] | None:
    """Of a request whose rules leave no token at output `position`, counted from 0: what to say, and the field to blame.

    None where it has no rule that can exclude a token; a bias, which is finite, can't.
    """
    default = SamplingParams()
    names = [name for name in _LIMITING if getattr(sampling, name) != getattr(default, name)]
    if not names:
        return None
    words = f"no token may come as number {position + 1} of the output: {' and '.join(names)} exclude all of them"
    return words, names[0]
