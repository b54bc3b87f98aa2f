"""Token ids to text, one by one: the pieces of a sequence concatenate to the one-shot decode of all its ids.

Two ways, both exact and both of constant amortised cost per token:

- a byte-level vocabulary (GPT-2, Llama 3, Qwen, SmolLM): tokens are bytes, so an incremental UTF-8 decoder is all it takes;
- any other: a token's text is what it adds after an anchor, an ordinary word that shields it from what decoders do only at
  the start of a text (SentencePiece drops a leading space there). Tokens that may be part of a character wait for the next
  one that is not, since a decoder judges a whole run of byte tokens at once.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from tllm_core.errors import ModelError
from tllm_core.text.protocol import Tokenizer

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """The text of one sequence. Ids go in once and in order; what comes out is never taken back."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was held back: the sequence has ended. U+FFFD stands for what never became a character."""
        ...


class NoText:
    """Where there is no tokenizer: tokens without text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Vocabulary:
    """What the tokens of one tokenizer look like, remembered. Make one per tokenizer; any threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[bool, BytePieces | TextPieces] = {}

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh one, for one sequence. Raises ModelError for a vocabulary without a single word."""
        pieces = self._pieces.get(skip_special_tokens)
        if pieces is None:
            kind = BytePieces if self.tokenizer.byte_level else TextPieces
            pieces = self._pieces[skip_special_tokens] = kind(self.tokenizer, skip_special_tokens)
        return ByteDetokenizer(pieces) if isinstance(pieces, BytePieces) else TextDetokenizer(pieces)


# ------------------------------------------------------------------------------------------------- byte-level


@cache
def byte_alphabet() -> dict[str, int]:
    """The character that GPT-2's alphabet writes each byte as: printable Latin-1 is itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. An added token that leaves the alphabet anywhere is its own UTF-8."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


class BytePieces(dict[int, tuple[bytes, str | None]]):
    """Token id -> its bytes, and its text where it is whole characters by itself."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> tuple[bytes, str | None]:
        piece = self[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> tuple[bytes, str | None]:
        if not self._tokenizer.decode([token_id], skip_special_tokens=self._skip):
            return b"", ""  # a special token that is skipped, or an id that the vocabulary does not have
        raw = token_bytes(self._tokenizer.convert_ids_to_tokens([token_id])[0] or "")
        try:
            return raw, raw.decode()
        except UnicodeDecodeError:
            return raw, None


class ByteDetokenizer:
    """For byte-level vocabularies: holds back at most the three bytes of an incomplete character."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, token_id: int) -> str:
        raw, text = self._pieces[token_id]
        if text is not None and not self._held:
            return text
        held = self._held + raw
        text, used = utf_8_decode(held, "replace", False)
        self._held = held[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------- any other kind


class TextPieces(dict[int, str | None]):
    """Token id -> the text that it adds to a sentence; None where that depends on its neighbours."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._anchor = self._find_anchor()
        self._anchor_length = len(self.decode([self._anchor]))

    def __missing__(self, token_id: int) -> str | None:
        piece = self[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> str | None:
        text = self.after_anchor([token_id])
        if text and (self._is_byte(token_id) or text.endswith(REPLACEMENT)):
            return None
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """`ids` as the beginning of a text."""
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def after_anchor(self, ids: Sequence[int]) -> str:
        """`ids` as they are in the middle of a text."""
        return self.decode([self._anchor, *ids])[self._anchor_length :]

    def _is_byte(self, token_id: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens([token_id])[0] or "") is not None

    def _find_anchor(self) -> int:
        special = self._tokenizer.special_ids
        for token_id in range(self._tokenizer.vocab_size):
            if token_id not in special and self.decode([token_id]).isalnum() and not self._is_byte(token_id):
                return token_id
        raise ModelError("the tokenizer's vocabulary has no token that is a word, so its text can't be streamed")


class TextDetokenizer:
    """For all other vocabularies: holds back a run of tokens that may be parts of characters, until one comes that is not."""

    __slots__ = ("_begun", "_held", "_pieces")

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._begun = False
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece == "" or (piece is not None and self._begun and not self._held):
            return piece
        self._held.append(token_id)
        if piece is None:
            return ""
        text = self._text()
        if text:  # else a lone leading space was dropped: only together with what follows is it seen as dropped
            self._begun = True
            self._held.clear()
        return text

    def flush(self) -> str:
        text = self._text()
        self._held.clear()
        return text

    def _text(self) -> str:
        return self._pieces.after_anchor(self._held) if self._begun else self._pieces.decode(self._held)
