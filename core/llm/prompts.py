"""What a caller may give as prompts and sampling parameters, and what becomes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tllm_core.contracts.messages import SamplingParams, TokenIds
from tllm_core.errors import RequestError
from tllm_core.text import Message, Tokenizer

Prompt: TypeAlias = str | TokenIds | Sequence[int]
Conversation: TypeAlias = Sequence[Message]
Params: TypeAlias = SamplingParams | Mapping[str, Any] | None

OPTIONS = ("timeout_s", "priority", "cache_salt", "trace_context", "extra")
"""The fields of GenerationRequest that are given as keywords."""


def is_one_prompt(prompts: object) -> bool:
    """Text or the ids of one prompt, as against a sequence of prompts."""
    if isinstance(prompts, str | TokenIds):
        return True
    with contextlib.suppress(TypeError):
        return memoryview(prompts).ndim == 1  # type: ignore[arg-type]
    return isinstance(prompts, Sequence) and bool(prompts) and hasattr(prompts[0], "__index__")


def is_one_conversation(messages: object) -> bool:
    """One list of messages, as against a list of such lists; what is neither is left to the check of messages."""
    return not (isinstance(messages, list | tuple) and messages and all(isinstance(m, list | tuple) for m in messages))


def check_options(options: Mapping[str, object]) -> None:
    """Raises RequestError for a keyword that is no option of a request."""
    for name in options:
        if name not in OPTIONS:
            raise RequestError(f"{name} is no option of a request; there are: {', '.join(OPTIONS)}", field=name)


def per_prompt(params: Params | Sequence[Params], count: int) -> Sequence[Params]:
    """One set of parameters for each of `count` prompts. Raises RequestError where the numbers differ."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"sampling_params must be SamplingParams, or one for each prompt, not {type(params).__name__}",
            field="sampling_params",
        )
    if len(params) != count:
        raise RequestError(
            f"there are {len(params)} sampling_params for {count} prompts; give one for all, or one each",
            field="sampling_params",
        )
    return params


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> TokenIds:
    """The token ids of a prompt. Raises RequestError for a text without any, or that is no Unicode."""
    try:
        ids = tokenizer.encode(text, add_special_tokens)
    except (TypeError, UnicodeEncodeError):
        raise RequestError("prompt holds half of a surrogate pair, which is no Unicode text", field="prompt") from None
    if not ids:
        raise RequestError("prompt is empty; at least one token is needed", field="prompt")
    return TokenIds.of(ids)
