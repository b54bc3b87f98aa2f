"""Runs of tokens that may not come: the last token of each is kept out where the others have just been generated."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence


class BadSequences:
    """The runs of one request that have more than one token; what has one may never come, and is among the offsets.

    Only what was generated counts, not the prompt. Runs are found by their last token but one, so that a step looks at
    those alone that may be at their end.
    """

    def __init__(self, runs: Iterable[Sequence[int]]) -> None:
        self._by_last: dict[int, list[tuple[array[int], int]]] = {}
        for run in runs:
            self._by_last.setdefault(run[-2], []).append((array("i", run[:-1]), run[-1]))

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> BadSequences | None:
        longer = [run for run in runs if len(run) > 1]
        return cls(longer) if longer else None

    def banned(self, token_ids: array[int], prompt_len: int) -> Iterator[int]:
        """The tokens that would complete a run after `token_ids`, of which the first `prompt_len` do not count."""
        length = len(token_ids)
        if length == prompt_len:
            return
        for before, last in self._by_last.get(token_ids[-1], ()):
            start = length - len(before)
            if start >= prompt_len and token_ids[start:] == before:
                yield last
