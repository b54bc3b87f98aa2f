"""Tokenizers from Hugging Face: the one file that imports transformers, and only when a tokenizer is asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tllm_core.errors import ModelError
from tllm_core.text.protocol import Message, Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""What `tokenizer_class` says where tokenizer.json holds all there is to know; loading it then needs no torch."""


def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model directory, a GGUF file, or a hub id ("owner/name", from the local cache where it is there).

    Raises ModelError, one line, for anything that is none of these, cannot be read, or cannot be had without a network.
    """
    name = os.fspath(path_or_hub_id)
    if os.path.isdir(name):
        return _load(name, name, _directory_class(name))
    if os.path.isfile(name):
        if not name.endswith(".gguf"):
            raise ModelError(
                f"{name} is a file; a tokenizer is loaded from a model directory, a .gguf file or a hub id"
            )
        return _load(name, os.path.dirname(name) or ".", gguf_file=os.path.basename(name))
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"there is no tokenizer at {name}: no such directory, and no hub id of the form owner/name")
    try:
        return _load(name, name, local_files_only=True)
    except ModelError:
        if _offline():
            raise
    return _load(name, name)


def as_tokenizer(tokenizer: str | os.PathLike[str] | Tokenizer | Any) -> Tokenizer:
    """A Tokenizer from a path, a hub id, a Hugging Face tokenizer, or a Tokenizer. Raises ModelError."""
    if isinstance(tokenizer, str | os.PathLike):
        return load_tokenizer(tokenizer)
    if hasattr(tokenizer, "byte_level") and hasattr(tokenizer, "special_ids"):
        return tokenizer
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "all_special_ids"):
        return HuggingFaceTokenizer(tokenizer)
    raise ModelError(f"tokenizer must be a path, a hub id or a tokenizer, not {type(tokenizer).__name__}")


class HuggingFaceTokenizer:
    """A transformers tokenizer as the text room sees it; `inner` is the original."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        backend = getattr(inner, "backend_tokenizer", None)
        added: Mapping[int, Any] = inner.added_tokens_decoder
        self._backend_decode = None if backend is None else backend.decode
        self.byte_level = backend is not None and _is_byte_level(backend.decoder)
        self.vocab_size: int = max(len(inner), *(token_id + 1 for token_id in added), 0)
        self.special_ids = frozenset(inner.all_special_ids) | {i for i, token in added.items() if token.special}
        self.eos_token_id: int | None = inner.eos_token_id
        self.bos_token_id: int | None = inner.bos_token_id

    @property
    def chat_template(self) -> str | None:
        template = self.inner.chat_template  # some models have several, by name
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._backend_decode is not None:
            return self._backend_decode(list(ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]
        return self.inner.decode(  # type: ignore[no-any-return]
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return list(self.inner.convert_ids_to_tokens(list(ids)))

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        return str(
            self.inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        )

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({self.inner.name_or_path!r}, vocab_size={self.vocab_size})"


def _is_byte_level(decoder: Any) -> bool:
    """The decoder joins bytes and does nothing else."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    kinds = [part["type"] for part in state.get("decoders", [state])]
    return "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}


def _directory_class(directory: str) -> str:
    """The tokenizer class that a model directory names."""
    path = Path(directory)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(f"{directory} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # what is wrong with it is said when it is loaded
        config = json.loads((path / "tokenizer_config.json").read_bytes())
        if (path / "tokenizer.json").is_file() and "auto_map" not in config:
            return str(config.get("tokenizer_class"))
    return ""


def _load(name: str, location: str, kind: str = "", **options: Any) -> Tokenizer:
    try:
        with _quiet():
            return HuggingFaceTokenizer(_loader(kind).from_pretrained(location, **options))
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    except Exception as error:  # transformers raises nearly every kind for a broken or missing file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"the tokenizer of {name} can't be loaded: {reason[:300]}") from error


def _loader(kind: str) -> Any:
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    if kind in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No advice to install torch, which a tokenizer does not need, and no line per retry of the hub: one error says it."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _missing(error: ModuleNotFoundError) -> ModelError:
    if error.name in ("transformers", "tokenizers", "jinja2"):
        return ModelError(f"text needs the package {error.name}; pip install 'tllm-core[text]'")
    return ModelError(f"the tokenizer needs a package that is not installed: {error}")


def _offline() -> bool:
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())
