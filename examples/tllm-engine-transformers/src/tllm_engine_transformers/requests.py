"""Which requests the engine takes, and what it knows of those it took."""

import time
from typing import Any

from msgspec import Struct, field
from msgspec.structs import fields

from tllm_core.contracts.messages import EngineRequest, RequestMetrics, SamplingParams
from tllm_core.errors import RequestError

SUPPORTS = frozenset({"stop_token_ids", "ignore_eos", "include_stop_str_in_output"})
"""All that transformers' continuous batching can be told per request, besides max_tokens. It is greedy or samples for all
requests alike, and here it is greedy; it finds common prefixes, so that it can't honour a cache_salt."""
_FREE = SUPPORTS | {"max_tokens", "skip_special_tokens"}
_REFUSED: tuple[tuple[str, Any], ...] = tuple(
    (each.name, each.default) for each in fields(SamplingParams) if each.name not in _FREE
)


class Limits(Struct, frozen=True):
    """max_seq_len: prompt and new tokens together."""

    vocab_size: int
    max_seq_len: int
    eos_token_ids: tuple[int, ...]


class Live(Struct):
    """A request that the engine owes something. ends: the token ids that end it. sent: how many tokens were fetched.

    Times are monotonic seconds; `first_at` is 0 until there is a token.
    """

    request: EngineRequest
    max_tokens: int
    ends: frozenset[int]
    since: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    sent: int = 0

    def metrics(self) -> RequestMetrics:
        """At its end. When it left transformers' queue is not known: `prefill_s` holds the wait."""
        return RequestMetrics(
            prefill_s=self.first_at - self.since,
            decode_s=time.monotonic() - self.first_at,
            prompt_tokens=len(self.request.prompt_token_ids),
            generated_tokens=self.sent,
        )


def accept(request: EngineRequest, limits: Limits) -> Live:
    """Raises RequestError, which names the field, for what this engine would have to ignore or could never end."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    _check_supported(request)
    if not len(prompt):
        raise RequestError("prompt_token_ids is empty; at least one token is needed", field="prompt_token_ids")
    if (largest := max(prompt.view)) >= limits.vocab_size:
        raise RequestError(
            f"prompt_token_ids has the token id {largest}, and the vocabulary ends at {limits.vocab_size - 1}",
            field="prompt_token_ids",
        )
    if (room := limits.max_seq_len - len(prompt)) < 1:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and the limit is {limits.max_seq_len} for prompt and new tokens together",
            field="prompt_token_ids",
        )
    if (wanted := sampling.max_tokens or room) > room:
        raise RequestError(f"max_tokens is {wanted}, and this prompt leaves room for {room}", field="max_tokens")
    own = () if sampling.ignore_eos else limits.eos_token_ids
    return Live(request, wanted, frozenset((*own, *sampling.stop_token_ids)))


def _check_supported(request: EngineRequest) -> None:
    for name, default in _REFUSED:
        if getattr(request.sampling, name) != default:
            raise RequestError(f"the transformers engine can't do {name} per request; leave it out", field=name)
    for name in ("cache_salt", "extra"):
        if getattr(request, name) is not None:
            raise RequestError(f"the transformers engine takes no {name}", field=name)
