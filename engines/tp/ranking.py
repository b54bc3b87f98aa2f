"""best_of: which of a request's sequences are returned, once all have ended."""

from __future__ import annotations

from msgspec import Struct, field

from tllm_core.contracts.messages import Output, RequestMetrics, TokenLogprobs


class _Held(Struct):
    """What one sequence has so far. score: the sum of its tokens' log-probabilities, the one that ended it included."""

    score: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Output | None = None


class Ranking:
    """Holds outputs back until the last; then come the `n` whose cumulative log-probability is the largest, best first.

    It is that of the raw logits, and longer answers are not favoured for their length. Where scores are equal, what was
    begun first goes first. The outputs are numbered anew, from 0.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._held: dict[int, _Held] = {}
        self._prompt_logprobs: list[TokenLogprobs] | None = None

    def take(self, output: Output, logprob: float) -> list[Output]:
        """Takes one sequence's next output; returns what the request is to get now. logprob: of the token sampled."""
        held = self._held.setdefault(output.index, _Held())
        held.score += logprob
        held.token_ids += output.token_ids
        held.logprobs += output.logprobs or ()
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = list(output.prompt_logprobs)
        if output.finish_reason is not None:
            held.end = output
        return [] if output.metrics is None else self._best(output.metrics)

    def _best(self, metrics: RequestMetrics) -> list[Output]:
        ranked = sorted(self._held.items(), key=lambda item: (-item[1].score, item[0]))
        best = [_whole(place, held) for place, (_, held) in enumerate(ranked[: self._n])]
        best[0].prompt_logprobs = self._prompt_logprobs
        best[-1].metrics = metrics
        return best


def _whole(place: int, held: _Held) -> Output:
    assert held.end is not None
    return Output(
        request_id=held.end.request_id,
        token_ids=held.token_ids,
        index=place,
        finish_reason=held.end.finish_reason,
        stop_reason=held.end.stop_reason,
        logprobs=held.logprobs or None,
    )
