"""One sequence's place in its grammar, and which tokens may come there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint32]
"""[words]: bit t % 32 of word t // 32 is set where token t may come."""

_SHARE_S, _CREDIT_S = 0.01, 0.25
"""CPU time for the mask of each token, and how far a sequence may be beyond it in all: others wait for it meanwhile."""

NO_MATCH = "no text can match it"
_DEAD_END = "NoExtensionBias"
"""What llguidance says where no token can come, and the answer is not complete."""


class Stops(NamedTuple):
    """What ends a request's sequences: there may be as many as the vocabulary has."""

    token_ids: frozenset[int]
    mask: Mask

    @classmethod
    def of(cls, token_ids: frozenset[int], words: int) -> Stops:
        """words: of the mask; all `token_ids` have their bit in it."""
        bits = np.zeros(32 * words, dtype=bool)
        bits[np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))] = True
        return cls(token_ids, np.packbits(bits, bitorder="little").view(np.uint32))


class Guide:
    """Follows the tokens of one sequence; neither preemption nor its row in a batch matters to it.

    error: why the grammar can't go on, None while it can. It is the request's own error.
    """

    __slots__ = ("_credit_s", "_end", "_first", "_matcher", "_stops", "error")

    def __init__(self, matcher: LLMatcher, first: Mask, end: int, stops: Stops) -> None:
        """first: the mask of the first token. end: the token that the grammar ends with; any of `stops` may then come."""
        self._matcher, self._end = matcher, end
        self._first: Mask | None = first
        self._stops = stops
        self._credit_s = _CREDIT_S
        self.error: str | None = None

    def fill(self, mask: Mask) -> None:
        """Writes which tokens may come next; none where there is an error."""
        if self._first is not None:
            mask[:] = self._first
        elif self.error is None:
            self._compute(mask)
        if self.error is not None:
            mask[:] = 0
        elif mask[self._end >> 5] >> np.uint32(self._end & 31) & np.uint32(1):
            mask |= self._stops.mask

    def follow(self, token: int) -> None:
        """Takes the token that was sampled; what ends the sequence is none of the grammar's."""
        self._first = None
        if token not in self._stops.token_ids and self.error is None and not self._matcher.consume_token(token):
            self.error = words_of(self._matcher)

    def _compute(self, mask: Mask) -> None:
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._credit_s = min(self._credit_s + _SHARE_S - (time.thread_time() - began), _CREDIT_S)
        if self._matcher.is_error():
            self.error = words_of(self._matcher)
        elif self._credit_s < 0:
            self.error = (
                f"its tokens take more than {1000 * _SHARE_S:g} ms each to choose; a simpler expression, or fewer"
                " alternatives that begin alike, would be faster"
            )


def words_of(matcher: LLMatcher) -> str:
    """The matcher's error, without the state that may follow it."""
    error = matcher.get_error().split("\n<", 1)[0].strip()
    return NO_MATCH if error == _DEAD_END else error
