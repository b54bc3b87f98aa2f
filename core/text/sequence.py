"""One sequence's text: token ids in, text that may be shown out, and how many tokens belong to it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import RequestError
from tllm_core.text.detokenizer import Detokenizer, NoText, Vocabulary
from tllm_core.text.stops import Match, StopScanner, StopStrings


def sequences_of(vocabulary: Vocabulary | None, params: SamplingParams) -> list[SequenceText]:
    """One per sequence of a request with `params`. Without a vocabulary there is no text, and no place for stop strings."""
    if vocabulary is None:
        if params.stop:
            raise RequestError("stop strings are found in text, and there is no tokenizer to make any", field="stop")
        return [SequenceText(NoText()) for _ in range(params.n)]
    stops = StopStrings(params.stop) if params.stop else None
    return [
        SequenceText(
            vocabulary.detokenizer(params.skip_special_tokens),
            stops,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        for _ in range(params.n)
    ]


class SequenceText:
    """Detokenizes and looks for stop strings. Sans-IO; the same in any grouping of tokens into steps.

    `token_count`: how many tokens may be shown. Without stop strings it is all of them. With stop strings it is the
    shortest run of tokens, from the first, whose text covers the text that may be shown; so a token is kept where its text
    begins before the cut, and one that lies wholly in the stop string or behind it is not.

    `min_tokens`: a stop string counts only if its last character comes with a later token than the first `min_tokens`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop: str | None = None
        self.ended = False
        self._detokenizer = detokenizer
        self._scanner = None if stops is None else StopScanner(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pushed = 0
        self._shown = 0
        self._held = ""
        self._ends = array("Q")
        """Per token: how much text was certain after it. Only where there are stop strings."""

    @property
    def token_count(self) -> int:
        if self._scanner is None or (self.ended and self.stop is None):
            return self._pushed
        return self._tokens_within(self._shown)

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that may be shown now. Ids behind a stop string are ignored."""
        if self._scanner is None:
            return self._push_plainly(token_ids)
        shown: list[str] = []
        for token_id in token_ids:
            if self.ended:
                break
            self._pushed += 1
            shown.append(self._scan(self._detokenizer.push(token_id)))
            self._ends.append(self._shown + len(self._held))
        return "".join(shown)

    def finish(self) -> str:
        """The sequence ended by itself: returns what was held back, up to a stop string that it may complete."""
        if self.ended:
            return ""
        text = self._detokenizer.flush()
        if self._scanner is not None:
            text = self._scan(text) + ("" if self.stop is not None else self._held)
        self.ended = True
        return text

    def _push_plainly(self, token_ids: Iterable[int]) -> str:
        if self.ended:
            return ""
        ids = list(token_ids)
        self._pushed += len(ids)
        return "".join(map(self._detokenizer.push, ids))

    def _scan(self, text: str) -> str:
        assert self._scanner is not None
        match = self._scanner.feed(text, armed=self._pushed > self._min_tokens)
        held = self._held + text
        if match is not None:
            return self._cut(match, held)
        keep = 0 if self._include_stop else self._scanner.held
        out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._shown += len(out)
        return out

    def _cut(self, match: Match, held: str) -> str:
        self.stop, self.ended = match.stop, True
        cut = match.end if self._include_stop else match.start
        out, self._held = held[: cut - self._shown], held[cut - self._shown :]
        self._shown = cut
        return out

    def _tokens_within(self, length: int) -> int:
        return min(bisect_left(self._ends, length) + 1, self._pushed) if length else 0
