"""Chat messages to a prompt, through the tokenizer's own template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tllm_core.errors import ModelError, RequestError
from tllm_core.text.protocol import Message, Tokenizer

_TAKES_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+\w+\s*(\.content\b|\[\s*['"]content['"]\s*\])""")
"""A template that walks over the parts of a content."""


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The prompt that `messages` make, special tokens written out; encode it without adding others.

    A content may be a list of text parts: {"type": "text", "text": ...}. They are joined by line breaks, unless the
    template takes such lists itself.
    add_generation_prompt: ends with the beginning of the assistant's turn. variables: further names for the template.
    Raises RequestError, which names the message and field, for messages that are malformed or that the template refuses.
    """
    check_messages(messages)
    messages = _as_the_template_likes(messages, tokenizer.chat_template or "")
    if tokenizer.chat_template is None:
        raise RequestError("the tokenizer has no chat template; use generate() with a prompt", field="messages")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
    except ImportError as error:
        raise ModelError("chat templates need the package jinja2; pip install 'tllm-core[text]'") from error
    except Exception as error:  # a template is the model's own code and raises what it likes
        raise RequestError(f"the chat template refuses the messages: {error}", field="messages") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raises RequestError, which names the message and field, unless each has a role and a content of text."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}", field="messages")
    if not messages:
        raise RequestError("messages is empty; at least one message is needed", field="messages")
    for position, message in enumerate(messages):
        _check_message(message, f"messages[{position}]")


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a mapping with role and content, not {message!r}", field=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role", "a non-empty string", message, "role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return  # an assistant's turn that only calls tools
    if isinstance(content, str):
        return
    if isinstance(content, list | tuple):
        for position, part in enumerate(content):
            _check_part(part, f"{where}.content[{position}]")
        return
    raise _wrong(f"{where}.content", "a string or a list of parts", message, "content")


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be a mapping with a type, not {part!r}", field=where)
    if part["type"] != "text":
        raise RequestError(f"{where} is a part of type {part['type']!r}, and only 'text' is supported", field=where)
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", "a string", part, "text")


def _as_the_template_likes(messages: Sequence[Message], template: str) -> Sequence[Message]:
    return messages if _TAKES_PARTS.search(template) else [_joined(message) for message in messages]


def _joined(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _wrong(where: str, wanted: str, mapping: Mapping[str, Any], key: str) -> RequestError:
    what = f"not {mapping[key]!r}" if key in mapping else "and is missing"
    return RequestError(f"{where} must be {wanted}, {what}", field=where)
