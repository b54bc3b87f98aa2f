"""Runs of tokens that may not come: the last token of each is kept out where the others have just been generated."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class BadSequences:
    """The runs of one request that have more than one token; what has one may never come, and is among the offsets.

    Only what was generated counts, not the prompt. Runs are found by all their tokens but the last, so that a step looks up
    one beginning of each length, however many runs there are.
    """

    def __init__(self, runs: Iterable[Sequence[int]]) -> None:
        lasts: dict[bytes, set[int]] = {}
        for run in runs:
            lasts.setdefault(array("i", run[:-1]).tobytes(), set()).add(run[-1])
        self._lasts = {before: np.fromiter(tokens, dtype=np.int64) for before, tokens in lasts.items()}
        width = array("i").itemsize
        self._lengths = sorted({len(before) // width for before in lasts})

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> BadSequences | None:
        longer = [run for run in runs if len(run) > 1]
        return cls(longer) if longer else None

    def banned(self, token_ids: array[int], prompt_len: int) -> list[npt.NDArray[np.int64]]:
        """The tokens that would complete a run after `token_ids`, of which the first `prompt_len` do not count."""
        generated = len(token_ids) - prompt_len
        found: list[npt.NDArray[np.int64]] = []
        for length in self._lengths:
            if length > generated:
                break
            last = self._lasts.get(token_ids[-length:].tobytes())
            if last is not None:
                found.append(last)
        return found
