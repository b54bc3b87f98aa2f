"""Small real tokenizers, one for each way in which a decoder works."""

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tllm_core.text import Tokenizer, as_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop! Über naïve façade, 你好世界, "
    "👩🏽‍🚀 and 🇩🇪 flags; café. def f(x):\n    return x + 1\n\n" * 3
]


def finished(backend: Backend) -> Tokenizer:
    """With a special, and two added tokens, one of which leaves the byte alphabet."""
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("é🙂")])
    return as_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen, SmolLM."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return finished(backend)


def bytes_unrecognized() -> Tokenizer:
    """Bytes under a decoder that is not known to be plain byte-level: the general way must be exact for it too."""
    tokenizer = byte_level()
    tokenizer.byte_level = False  # type: ignore[misc]
    return tokenizer


SENTENCE_PIECES = [
    "<unk>",
    "▁",
    "▁leading",
    "▁x",
    "▁Hello",
    "▁world",
    "lo",
    "ST",
    "OP",
    "\ufffd",
    "▁▁",
    "é",
    "你",
    "!",
    "▁S",
]


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: pieces, byte tokens for what has none, one leading space dropped."""
    tokens = [*SENTENCE_PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finished(backend)


def metaspace() -> Tokenizer:
    """As T5 and XLM-R: the first token alone loses its leading spaces."""
    backend = Backend(models.Unigram([(token, -float(i)) for i, token in enumerate(SENTENCE_PIECES)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return finished(backend)


def word_piece() -> Tokenizer:
    """As BERT: a space before each word but the first."""
    tokens = ["[UNK]", "hello", "##lo", "world", ".", "##s", "é", "你"]
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return finished(backend)


def words() -> Tokenizer:
    """No decoder at all: words joined by spaces."""
    tokens = ["ABC", "DEF", "G", "HI", "J", "", "\ufffd"]
    return finished(Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="G")))


KINDS = {kind.__name__: kind for kind in (byte_level, bytes_unrecognized, byte_fallback, metaspace, word_piece, words)}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: make() for name, make in KINDS.items()}


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    vocabulary = tokenizer.inner.get_vocab()  # type: ignore[attr-defined]
    return [vocabulary[token] for token in tokens]


@pytest.fixture(scope="session")
def ids() -> object:
    return ids_of
