"""What the text room needs of a tokenizer, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""One chat message: "role" and "content", and whatever else a template knows."""


class Tokenizer(Protocol):
    """Text to token ids and back. `as_tokenizer` makes one of a Hugging Face tokenizer; any object of this shape will do.

    vocab_size: one past the largest known id. byte_level: every token is a run of bytes in the GPT-2 alphabet, and
    `decode` is their concatenation as UTF-8. chat_template: Jinja source, None = the model has none.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def byte_level(self) -> bool: ...
    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the model's own begin (and end) tokens where `add_special_tokens`."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all `ids` at once, without any clean-up of spaces. Ids outside the vocabulary have no text."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id; None for an id that it does not have."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Renders `messages` with the chat template."""
        ...
