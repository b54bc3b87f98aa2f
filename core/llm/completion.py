"""One sequence of a request, with its text."""

from __future__ import annotations

from io import StringIO

from tllm_core.contracts.messages import Logprob
from tllm_core.ledger.result import CompletionOutput
from tllm_core.text import SequenceText


class TextCompletionOutput(CompletionOutput):
    """A CompletionOutput whose tokens are also text.

    text: all that may be shown so far; text_diff: what the iterating consumer had not seen before this update. Token ids
    and logprobs are those of the text: what is held back, or cut off at a stop string, is in neither (SequenceText says
    by which rule). A stop string ends the sequence with finish_reason "stop", and is the stop_reason.
    """

    __slots__ = ("_buffer", "_sequence", "_taken", "_unseen", "text_diff")

    def __init__(self, index: int, sequence: SequenceText) -> None:
        super().__init__(index)
        self.text_diff = ""
        self._sequence = sequence
        self._taken = 0
        self._buffer = StringIO()
        self._unseen: list[str] = []

    @property
    def text(self) -> str:
        return self._buffer.getvalue()

    def take(self, source: CompletionOutput, ended: bool) -> bool:
        """Takes over what `source` has gained, and nothing any more once this sequence has its end; True for news.

        `ended`: the request is over, with or without a finish of this sequence.
        """
        if self.finish_reason is not None:
            return False
        sequence = self._sequence
        arrived = source.token_ids[self._taken :]
        self._taken += len(arrived)
        text = sequence.push(arrived)
        if ended or source.finish_reason is not None:
            text += sequence.finish()
        if sequence.stop is not None:
            self.finish_reason, self.stop_reason = "stop", sequence.stop
        else:
            self.finish_reason, self.stop_reason = source.finish_reason, source.stop_reason
        if text:
            self._buffer.write(text)
            self._unseen.append(text)
        gained = self._take_tokens(source, sequence.token_count)
        self._take_extra(source)
        return bool(text) or gained or self.finish_reason is not None

    def _take_tokens(self, source: CompletionOutput, count: int) -> bool:
        have = len(self.token_ids)
        if count <= have:
            return False
        self.token_ids += source.token_ids[have:count]
        if source.logprobs is not None:
            positions = source.logprobs[have:count]
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += positions
            sampled = zip(self.token_ids[have:count], positions, strict=False)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(_sampled(*each) for each in sampled)
        return True

    def _take_extra(self, source: CompletionOutput) -> None:
        self.prompt_logprobs = source.prompt_logprobs
        self.metrics, self.handoff, self.extra = source.metrics, source.handoff, source.extra

    def show(self) -> None:
        """The iterating consumer is about to see everything up to here."""
        self._from, self._to = self._to, len(self.token_ids)
        self.text_diff = "".join(self._unseen)
        self._unseen.clear()

    def has_news(self) -> bool:
        """The last `show` showed tokens or text."""
        return self._to > self._from or bool(self.text_diff)

    def __repr__(self) -> str:
        return (
            f"TextCompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


def _sampled(token_id: int, position: dict[int, Logprob]) -> float:
    found = position.get(token_id)
    return 0.0 if found is None else found.logprob
