"""What is streamed concatenates to the one-shot decode, and never holds a character that is not whole."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_core.errors import ModelError
from tllm_core.text import Tokenizer, Vocabulary
from tllm_core.text.detokenizer import byte_alphabet

IdsOf = Callable[[Tokenizer, Sequence[str]], list[int]]
KINDS = ["byte_level", "bytes_unrecognized", "byte_fallback", "metaspace", "word_piece", "words"]


@pytest.fixture(scope="session")
def vocabularies(tokenizers: dict[str, Tokenizer]) -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in tokenizers.items()}


def streamed(vocabulary: Vocabulary, token_ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = vocabulary.detokenizer(skip)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(choices=st.lists(st.integers(0, 2**31 - 1), max_size=24))
@settings(max_examples=100, deadline=None)
def test_any_ids_stream_to_their_one_shot_decode(
    vocabularies: dict[str, Vocabulary], kind: str, skip: bool, choices: list[int]
) -> None:
    vocabulary = vocabularies[kind]
    size = vocabulary.tokenizer.vocab_size + 2  # two ids that nobody knows
    token_ids = [choice % size for choice in choices]
    assert "".join(streamed(vocabulary, token_ids, skip)) == vocabulary.tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "bytes_unrecognized", "byte_fallback"])
@given(text=st.text(max_size=30), cut=st.integers(0, 3), junk=st.binary(max_size=6))
@settings(max_examples=100, deadline=None)
def test_bytes_of_any_text_whole_or_broken_stream_to_their_one_shot_decode(
    vocabularies: dict[str, Vocabulary], ids: IdsOf, kind: str, text: str, cut: int, junk: bytes
) -> None:
    vocabulary = vocabularies[kind]
    raw = text.encode(errors="replace")
    raw = raw[: len(raw) - cut] + junk + text.encode(errors="replace")
    token_ids = ids(vocabulary.tokenizer, [byte_token(kind, byte) for byte in raw])
    assert "".join(streamed(vocabulary, token_ids)) == vocabulary.tokenizer.decode(token_ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_chunk_of_a_byte_level_text_has_a_broken_character(vocabularies: dict[str, Vocabulary], text: str) -> None:
    vocabulary = vocabularies["byte_level"]
    whole = text.replace("\ufffd", "")
    chunks = streamed(vocabulary, vocabulary.tokenizer.encode(whole), skip=False)
    assert "".join(chunks) == whole
    assert not any("\ufffd" in chunk for chunk in chunks)


def byte_token(kind: str, byte: int) -> str:
    if kind == "byte_fallback":
        return f"<0x{byte:02X}>"
    return next(character for character, value in byte_alphabet().items() if value == byte)


@pytest.mark.parametrize("text", ["👩🏽‍🚀", "é"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_b77_a_character_of_several_tokens_is_held_back_until_it_is_complete(
    vocabularies: dict[str, Vocabulary], ids: IdsOf, kind: str, text: str
) -> None:
    vocabulary = vocabularies[kind]
    token_ids = ids(vocabulary.tokenizer, [byte_token(kind, byte) for byte in text.encode()])
    chunks = streamed(vocabulary, token_ids)
    assert "".join(chunks) == text == vocabulary.tokenizer.decode(token_ids)
    assert all("\ufffd" not in chunk for chunk in chunks)


def test_b77_a_complete_byte_level_character_is_not_held_any_longer(
    vocabularies: dict[str, Vocabulary], ids: IdsOf
) -> None:
    vocabulary = vocabularies["byte_level"]
    token_ids = ids(vocabulary.tokenizer, [byte_token("byte_level", byte) for byte in "€é".encode()])
    assert streamed(vocabulary, token_ids) == ["", "", "€", "", "é", ""]


@pytest.mark.parametrize("tokens", [["▁", "▁leading", "▁x"], ["▁Hello", "▁", "▁world"], ["▁▁", "▁", "lo"], ["▁"]])
@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_b78_leading_spaces_are_kept_space_for_space(
    vocabularies: dict[str, Vocabulary], ids: IdsOf, kind: str, tokens: list[str]
) -> None:
    vocabulary = vocabularies[kind]
    token_ids = ids(vocabulary.tokenizer, tokens)
    assert "".join(streamed(vocabulary, token_ids)) == vocabulary.tokenizer.decode(token_ids)


def test_a_leading_space_after_a_skipped_special_token_is_kept(vocabularies: dict[str, Vocabulary], ids: IdsOf) -> None:
    vocabulary = vocabularies["byte_fallback"]
    token_ids = ids(vocabulary.tokenizer, ["<s>", "▁Hello", "<|end|>", "▁world", "<|end|>"])
    assert "".join(streamed(vocabulary, token_ids)) == "Hello world"
    assert "".join(streamed(vocabulary, token_ids, skip=False)) == vocabulary.tokenizer.decode(token_ids, False)


def test_a_special_token_in_the_middle_of_a_character_does_not_break_it(
    vocabularies: dict[str, Vocabulary], ids: IdsOf
) -> None:
    vocabulary = vocabularies["byte_level"]
    first, second = (byte_token("byte_level", byte) for byte in "é".encode())
    token_ids = ids(vocabulary.tokenizer, [first, "<|end|>", second])
    assert "".join(streamed(vocabulary, token_ids)) == "é"


def test_a_replacement_character_that_the_model_wrote_is_text(vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies["byte_level"]
    assert "".join(streamed(vocabulary, vocabulary.tokenizer.encode("a\ufffdb\ufffd"))) == "a\ufffdb\ufffd"


def test_an_incomplete_character_at_the_end_comes_with_the_flush(
    vocabularies: dict[str, Vocabulary], ids: IdsOf
) -> None:
    vocabulary = vocabularies["byte_level"]
    token_ids = ids(vocabulary.tokenizer, [byte_token("byte_level", byte) for byte in b"a\xf0\x9f\x98"])
    assert streamed(vocabulary, token_ids) == ["a", "", "", "", "\ufffd"]


class Counting:
    """A tokenizer that counts the ids which it is given to decode."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.decoded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return self.inner.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", [[0], [3, 0, 4], [30], [30, 200, 100], [4, 30, 6, 9]])
def test_the_cost_of_a_token_does_not_grow_with_the_text(
    tokenizers: dict[str, Tokenizer], kind: str, pattern: list[int]
) -> None:
    counting = Counting(tokenizers[kind])
    token_ids = [pattern[i % len(pattern)] % counting.vocab_size for i in range(2000)]  # type: ignore[operator]
    chunks = streamed(Vocabulary(counting), token_ids)  # type: ignore[arg-type]
    assert "".join(chunks) == tokenizers[kind].decode(token_ids)
    assert counting.decoded <= 3 * len(token_ids) + 1000


def test_a_vocabulary_without_a_word_is_a_model_error(tokenizers: dict[str, Tokenizer]) -> None:
    class Wordless(Counting):
        vocab_size = 1

    with pytest.raises(ModelError, match="no token that is a word"):
        Vocabulary(Wordless(tokenizers["byte_fallback"])).detokenizer()  # type: ignore[arg-type]


def test_two_sequences_of_one_vocabulary_do_not_mix(vocabularies: dict[str, Vocabulary], ids: IdsOf) -> None:
    vocabulary = vocabularies["byte_level"]
    first, second = vocabulary.detokenizer(), vocabulary.detokenizer()
    start, end = ids(vocabulary.tokenizer, [byte_token("byte_level", byte) for byte in "é".encode()])
    assert (first.push(start), second.push(start), first.push(end), second.flush()) == ("", "", "é", "\ufffd")
