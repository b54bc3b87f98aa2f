"""What a request must be, checked on the caller's side against what the engine said of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tllm_core.contracts.messages import EngineInfo, GenerationRequest, SamplingParams, TokenIds
from tllm_core.contracts.requests import check_request
from tllm_core.errors import RequestError

ALWAYS = frozenset({"max_tokens", "skip_special_tokens"})
"""Fields that every engine honours, or that are the frontend's own."""
HINTS = frozenset({"prompt_token_ids", "sampling", "streaming", "timeout_s", "priority", "trace_context"})
"""Request fields that never refuse: the boundary's own, and hints."""


def _optional_fields(struct: type[msgspec.Struct], free: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in msgspec.structs.fields(struct) if field.name not in free)


_SAMPLING_FIELDS = _optional_fields(SamplingParams, ALWAYS)
_REQUEST_FIELDS = _optional_fields(GenerationRequest, HINTS)


def default_sampling(info: EngineInfo, sampling: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """`sampling`, or the engine's own defaults where a caller gave none."""
    if isinstance(sampling, SamplingParams):
        return sampling
    fields = info.sampling_defaults if sampling is None else sampling
    if not isinstance(fields, Mapping):
        raise RequestError(
            f"sampling_params must be SamplingParams, not {type(sampling).__name__}", field="sampling_params"
        )
    unknown = set(fields) - set(SamplingParams.__struct_fields__)
    if unknown:
        name = sorted(unknown)[0]
        raise RequestError(f"{name} is no sampling parameter", field=name)
    return SamplingParams(**fields)


class Checks:
    """Checks requests against one engine. Sampling parameters that were good are not looked at again: they are immutable,
    and callers use one object for many requests."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._good: SamplingParams | None = None

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, which names the field, for whatever the engine could not serve."""
        check_request(request)
        sampling, info = request.sampling, self._info
        if sampling is not self._good or sampling.best_of is not None:
            sampling.check(streaming=request.streaming)
            _check_supported(sampling, _SAMPLING_FIELDS, info)
            for name, largest in sampling.largest_ids():
                _check_vocabulary(name, largest, info)
            self._good = sampling
        _check_supported(request, _REQUEST_FIELDS, info)
        _check_prompt(request.prompt_token_ids, info)
        _check_length(len(request.prompt_token_ids), sampling.max_tokens, info)


def _check_supported(struct: msgspec.Struct, fields: tuple[tuple[str, Any], ...], info: EngineInfo) -> None:
    for name, default in fields:
        if getattr(struct, name) != default and name not in info.supports:
            hint = _HINTS.get(name, "")
            raise RequestError(f"the engine of {info.model!r} does not support {name}{hint}", field=name)


_HINTS = {
    "stop": "; use LLM, which finds stop strings in the text",
    "bad_words": "; use LLM, which knows the tokens of words",
    "guided": "; the tp engine does, for models with a tokenizer: pip install 'tllm-core[guided]' where it runs",
}


def _check_prompt(prompt: TokenIds, info: EngineInfo) -> None:
    if not len(prompt):
        raise RequestError("prompt_token_ids is empty; at least one token is needed", field="prompt_token_ids")
    if info.vocab_size is not None:  # else nobody needs the largest of what may be very many
        _check_vocabulary("prompt_token_ids", max(prompt.view), info)


def _check_vocabulary(field: str, largest: int, info: EngineInfo) -> None:
    if info.vocab_size is not None and largest >= info.vocab_size:
        raise RequestError(
            f"{field} has the token id {largest}, and the vocabulary ends at {info.vocab_size - 1}", field=field
        )


def _check_length(prompt: int, max_tokens: int | None, info: EngineInfo) -> None:
    limit = info.max_seq_len
    if limit is None:
        return
    if prompt >= limit:
        raise RequestError(
            f"the prompt has {prompt} tokens and the limit is {limit} for prompt and new tokens together",
            field="prompt_token_ids",
        )
    if max_tokens is not None and prompt + max_tokens > limit:
        raise RequestError(
            f"the prompt's {prompt} tokens and max_tokens {max_tokens} are {prompt + max_tokens} together; the limit is {limit}",
            field="max_tokens",
        )
