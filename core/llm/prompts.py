"""What a caller may give as prompts and sampling parameters, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tllm_core.contracts.messages import TokenIds
from tllm_core.errors import RequestError
from tllm_core.text import Message, Tokenizer

Prompt: TypeAlias = str | TokenIds | Sequence[int]
Conversation: TypeAlias = Sequence[Message]

OPTIONS = ("timeout_s", "priority", "cache_salt", "trace_context", "extra")
"""The fields of GenerationRequest that are given as keywords."""


def is_one_conversation(messages: object) -> bool:
    """One list of messages, as against a list of such lists; what is neither is left to the check of messages."""
    return not (isinstance(messages, list | tuple) and messages and all(isinstance(m, list | tuple) for m in messages))


def check_options(options: Mapping[str, object]) -> None:
    """Raises RequestError for a keyword that is no option of a request."""
    for name in options:
        if name not in OPTIONS:
            raise RequestError(f"{name} is no option of a request; there are: {', '.join(OPTIONS)}", field=name)


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> TokenIds:
    """The token ids of a prompt. Raises RequestError for a text without any, or that is no Unicode."""
    try:
        ids = tokenizer.encode(text, add_special_tokens)
    except (TypeError, UnicodeEncodeError):
        raise RequestError("prompt holds half of a surrogate pair, which is no Unicode text", field="prompt") from None
    if not ids:
        raise RequestError("prompt is empty; at least one token is needed", field="prompt")
    return TokenIds.of(ids)
