"""Which runs of tokens are a word, so that an engine that knows tokens alone can keep it out."""

from __future__ import annotations

from collections.abc import Sequence

from tllm_core.errors import RequestError
from tllm_core.text.protocol import Tokenizer


def token_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's own token ids, as the tokenizer writes it at the start of a text and behind a space; each run once.

    Other spellings of the same word, in other case or cut into tokens in another way, are not among them. Raises
    RequestError, of the field `bad_words`, for a word that has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise RequestError(f"bad_words has {word!r}, which is no word", field="bad_words")
        for text in (bare, f" {bare}"):
            try:
                run = tuple(tokenizer.encode(text, add_special_tokens=False))
            except (TypeError, UnicodeEncodeError):
                raise RequestError(f"bad_words has {word!r}, which is no Unicode text", field="bad_words") from None
            if not run:
                raise RequestError(f"bad_words has {word!r}, which the tokenizer has no tokens for", field="bad_words")
            found[run] = None
    return tuple(found)
