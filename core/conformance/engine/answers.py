"""What an engine has told of one request, and the rules that every output keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from tllm_core.contracts.messages import (
    EngineInfo,
    EngineRequest,
    ErrorReport,
    Logprob,
    Output,
    RequestMetrics,
    SamplingParams,
    TokenLogprobs,
)

ROUNDING = 1e-4
"""By how much a log-probability may be off."""


class Answer(Struct, eq=False):
    """All outputs of one request so far. ends: the last output of each sequence that has ended, by index."""

    request: EngineRequest
    outputs: list[Output] = field(default_factory=list)
    ends: dict[int, Output] = field(default_factory=dict)
    error: ErrorReport | None = None
    aborted: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def over(self) -> bool:
        """Whether the engine owes nothing more for it."""
        return self.aborted or self.error is not None or len(self.ends) == self.sampling.n

    def tokens(self, index: int = 0) -> list[int]:
        return [token for output in self.outputs if output.index == index for token in output.token_ids]

    def all_tokens(self) -> list[list[int]]:
        return [self.tokens(index) for index in range(self.sampling.n)]

    def logprobs(self, index: int = 0) -> list[TokenLogprobs]:
        """One entry per token."""
        mine = [output for output in self.outputs if output.index == index]
        return [entry for output in mine for entry in output.logprobs or ()]

    def prompt_logprobs(self) -> list[Sequence[TokenLogprobs]]:
        """Each that was delivered; there should be one at most."""
        return [output.prompt_logprobs for output in self.outputs if output.prompt_logprobs is not None]

    def reasons(self) -> list[str | None]:
        return [self.ends[index].finish_reason for index in sorted(self.ends)]

    def take(self, output: Output, info: EngineInfo) -> None:
        """Notes one output. AssertionError where it breaks a rule."""
        who = f"request {self.request.request_id} (index {output.index})"
        assert not self.aborted, f"{who} was aborted, and the engine still delivers for it"
        assert self.error is None, f"{who} ended with an error, and the engine still delivers for it"
        assert output.index in range(self.sampling.n), f"{who}: n is {self.sampling.n}"
        assert output.index not in self.ends, f"{who}: that sequence has ended, and the engine still delivers for it"
        check_output(output, who, info)
        self.outputs.append(output)
        if output.error is not None:
            self.error = output.error
        elif output.finish_reason is not None:
            self.ends[output.index] = output
        self._check_count(output, who)

    def _check_count(self, output: Output, who: str) -> None:
        limit, count = self.sampling.max_tokens, len(self.tokens(output.index))
        assert limit is None or count <= limit, (
            f"{who} got {count} tokens, and max_tokens is {limit}: are they cumulative rather than deltas?"
        )

    def check_whole(self, info: EngineInfo) -> None:
        """It ended as it may: without an error, each sequence once, for a reason that its parameters give."""
        who = f"request {self.request.request_id}"
        assert self.error is None, f"{who} failed: {self.error}"
        assert sorted(self.ends) == list(range(self.sampling.n)), f"{who}: only {sorted(self.ends)} ended"
        for index, end in self.ends.items():
            self._check_end(index, end, f"{who} (index {index})", info)
        for output in self.outputs:
            if output.metrics is not None:
                check_metrics(output.metrics, self)

    def _check_end(self, index: int, end: Output, who: str, info: EngineInfo) -> None:
        sampling, count = self.sampling, len(self.tokens(index))
        assert end.finish_reason in ("length", "stop"), f"{who} ended with {end.finish_reason!r}"
        if end.finish_reason == "length":
            room = (info.max_seq_len or 1 << 62) - len(self.request.prompt_token_ids)
            wanted = room if sampling.max_tokens is None else sampling.max_tokens
            assert count == wanted, f"{who} ended with 'length' after {count} tokens, and {wanted} were asked for"
            assert end.stop_reason is None, f"{who} ended with 'length' and stop_reason {end.stop_reason!r}"
            return
        own_end = sampling.guided is not None or (bool(info.eos_token_ids) and not sampling.ignore_eos)
        assert own_end or sampling.stop_token_ids, f"{who} ended with 'stop', and nothing could have stopped it"
        assert end.stop_reason is None or end.stop_reason in sampling.stop_token_ids, (
            f"{who}: stop_reason {end.stop_reason!r} is none of stop_token_ids {sampling.stop_token_ids}"
        )
        # The token that stops may be kept back.
        assert count >= sampling.min_tokens, f"{who} stopped after {count} tokens; min_tokens is {sampling.min_tokens}"


def check_output(output: Output, who: str, info: EngineInfo) -> None:
    """What must hold for every output by itself."""
    assert isinstance(output, Output), f"{who}: an output is an Output, not {type(output).__name__}"
    for token in output.token_ids:
        assert type(token) is int, f"{who}: a token id must be an int, not {type(token).__name__} ({token!r})"
        assert 0 <= token < (info.vocab_size or 1 << 31), f"{who}: token id {token} is outside the vocabulary"
    assert output.finish_reason in (None, "stop", "length", "abort", "error"), (
        f"{who}: there is no finish reason {output.finish_reason!r} for an engine"
    )
    assert output.error is None or output.error.message, f"{who}: an error without a message"
    if output.logprobs is not None and len(output.token_ids):
        assert len(output.logprobs) == len(output.token_ids), (
            f"{who}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens"
        )
    for name in ("extra", "handoff"):
        value = getattr(output, name)
        assert value is None or isinstance(value, dict), f"{who}: {name} must be a dict, not {value!r}"
        check_plain(value, f"{who}: {name}")
    msgspec.msgpack.encode(output)


def check_plain(value: Any, where: str) -> None:
    """AssertionError for what could not cross a process boundary as it is."""
    if isinstance(value, dict):
        for key, inner in value.items():
            assert type(key) is str, f"{where}: the key {key!r} is no string"
            check_plain(inner, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for inner in value:
            check_plain(inner, where)
    else:
        plain = value is None or type(value) in (bool, int, float, str, bytes)
        assert plain, f"{where} is no plain data: it holds a {type(value).__name__}"


def check_metrics(metrics: RequestMetrics, answer: Answer) -> None:
    who, prompt = f"the metrics of request {answer.request.request_id}", len(answer.request.prompt_token_ids)
    delivered = sum(map(len, answer.all_tokens()))
    assert metrics.prompt_tokens in (0, prompt), f"{who} have {metrics.prompt_tokens} prompt tokens, not {prompt}"
    # Of a sequence that stopped, the token that did it may be kept back.
    most = delivered + answer.reasons().count("stop")
    if answer.sampling.sequences > answer.sampling.n:  # those that were not chosen count too
        most = metrics.generated_tokens
    assert metrics.generated_tokens == 0 or delivered <= metrics.generated_tokens <= most, (
        f"{who} have {metrics.generated_tokens} generated tokens, and {delivered} were delivered"
    )
    for name in ("queued_s", "prefill_s", "decode_s"):
        assert 0 <= getattr(metrics, name) < 3600, f"{who}: {name} is {getattr(metrics, name)} s"


def check_logprobs(entries: TokenLogprobs, token: int, top: int, vocab: int | None, who: str) -> None:
    """One position: the token's own first, then the `top` largest, best first."""
    assert entries, f"{who} has no entry"
    assert all(isinstance(entry, Logprob) for entry in entries), f"{who}: entries are Logprob, not {entries[0]!r}"
    own, best = entries[0], list(entries[1:])
    assert own.token_id == token, f"{who}: the first entry is of token {own.token_id}, and the token is {token}"
    assert len(best) == min(top, vocab or top), f"{who}: {len(best)} entries for a top {top}"
    assert all(math.isfinite(entry.logprob) and entry.logprob <= ROUNDING for entry in entries), (
        f"{who}: no natural logs of probabilities: {entries}"
    )
    values = [entry.logprob for entry in best]
    assert values == sorted(values, reverse=True), f"{who}: the top {top} are not descending: {values}"
    assert [entry.rank for entry in best] == list(range(1, len(best) + 1)), f"{who}: ranks {best}"
    assert sum(map(math.exp, values)) <= 1 + ROUNDING, f"{who}: the probabilities are more than 1 together"
    assert own.rank >= 1, f"{who}: rank {own.rank}"
    for entry in best:
        if entry.token_id == token:
            assert abs(entry.logprob - own.logprob) <= ROUNDING, f"{who}: two values for token {token}: {entries}"
    if best and own.rank > len(best):
        assert own.logprob <= values[-1] + ROUNDING, f"{who}: rank {own.rank} is better than the top {top}"
