"""Stop strings: found where they first complete, never leaked, and the same for every grouping of tokens into steps."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_core.contracts.messages import SamplingParams
from tllm_core.text import SequenceText, StopScanner, StopStrings, Tokenizer, Vocabulary, sequences_of

IdsOf = Callable[[Tokenizer, Sequence[str]], list[int]]


class Spelled:
    """A detokenizer over a table of texts; one that ends with "~" is held until the next without."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.held = ""

    def push(self, token_id: int) -> str:
        self.held += self.texts[token_id].rstrip("~")
        return "" if self.texts[token_id].endswith("~") else self.flush()

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


def reference(
    texts: Sequence[str], stops: Sequence[str], include: bool, min_tokens: int
) -> tuple[str, int, str | None]:
    """(text, token count, stop) by a scan of the whole text, character by character."""
    spelled, certain, owner = Spelled(texts), [], []
    for position in range(len(texts)):
        piece = spelled.push(position)
        owner += [position] * len(piece)
        certain.append(len(owner))
    text = "".join(text.rstrip("~") for text in texts)
    owner += [len(texts) - 1] * (len(text) - len(owner))
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and owner[end - 1] >= min_tokens:
            stop = max(found, key=len)
            cut = end if include else end - len(stop)
            kept = [position for position in range(len(texts)) if ([0, *certain])[position] < cut]
            return text[:cut], len(kept), stop
    return text, len(texts), None


pieces = st.text("ab", max_size=3)
texts_of = st.lists(st.builds(lambda text, held: text + "~" * held, pieces, st.booleans()), max_size=14)


@given(
    texts=texts_of,
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    steps=st.lists(st.integers(1, 5), max_size=14),
)
@settings(max_examples=400, deadline=None)
def test_text_tokens_and_stop_equal_a_scan_of_the_whole_text_and_nothing_is_leaked(
    texts: list[str], stops: list[str], include: bool, min_tokens: int, steps: list[int]
) -> None:
    expected = reference(texts, stops, include, min_tokens)
    sequence = SequenceText(Spelled(texts), StopStrings(stops), include_stop=include, min_tokens=min_tokens)
    shown, counts, ids = "", [0], list(range(len(texts)))
    for size in [*steps, *[1] * len(texts)]:
        shown += sequence.push(ids[:size])
        del ids[:size]
        counts.append(sequence.token_count)
        assert expected[0].startswith(shown)
        assert counts[-1] <= expected[1]
    shown += sequence.finish()
    assert (shown, sequence.token_count, sequence.stop) == expected
    assert counts == sorted(counts)


@given(texts=texts_of, steps=st.lists(st.integers(0, 4), max_size=14))
@settings(max_examples=100, deadline=None)
def test_without_stop_strings_every_token_is_shown_at_once(texts: list[str], steps: list[int]) -> None:
    sequence, shown, ids = SequenceText(Spelled(texts)), "", list(range(len(texts)))
    for size in steps:
        shown += sequence.push(ids[:size])
        del ids[:size]
        assert sequence.token_count == len(texts) - len(ids)
    shown += sequence.push(ids) + sequence.finish()
    assert shown == "".join(text.rstrip("~") for text in texts)
    assert sequence.token_count == len(texts)


def run(texts: Sequence[str], stop: str, step: int = 1, include: bool = False) -> tuple[list[str], int, str | None]:
    sequence = SequenceText(Spelled(texts), StopStrings([stop]), include_stop=include)
    chunks = [sequence.push(range(len(texts))[at : at + step]) for at in range(0, len(texts), step)]
    return [*chunks, sequence.finish()], sequence.token_count, sequence.stop


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_b80_a_stop_string_over_several_tokens_is_never_sent(step: int) -> None:
    chunks, count, stop = run(["ABC", "DEF", "G", "HI", "J"], "DEFGHIJ", step)
    assert ("".join(chunks), count, stop) == ("ABC", 1, "DEFGHIJ")


def test_b80_what_turns_out_to_be_no_stop_string_is_sent_as_soon_as_that_is_known() -> None:
    chunks, count, stop = run(["ABC", "DEF", "G", "HI", "K"], "DEFGHIJ")
    assert chunks == ["ABC", "", "", "", "DEFGHIK", ""]
    assert (count, stop) == (5, None)


def test_b80_the_beginning_of_a_stop_string_at_the_end_is_text() -> None:
    chunks, count, stop = run(["ABC", "DEF"], "DEFGHIJ")
    assert ("".join(chunks), count, stop) == ("ABCDEF", 2, None)


def test_a_stop_string_inside_one_token_cuts_it_and_keeps_the_token() -> None:
    assert run(["ab", "xSTOPy", "z"], "STOP") == (["ab", "x", "", ""], 2, "STOP")
    assert run(["ab", "xSTOPy", "z"], "STOP", include=True) == (["ab", "xSTOP", "", ""], 2, "STOP")


def test_included_stop_strings_keep_their_tokens() -> None:
    assert run(["a", "ST", "OP", "z"], "STOP", include=True) == (["a", "ST", "OP", "", ""], 3, "STOP")


def test_a_stop_string_at_the_very_beginning_leaves_no_text_and_no_token() -> None:
    assert run(["ST", "OP"], "STOP") == (["", "", ""], 0, "STOP")


def test_of_stop_strings_that_complete_together_the_longest_wins() -> None:
    sequence = SequenceText(Spelled(["ab", "c"]), StopStrings(["bc", "abc", "c"]))
    assert sequence.push([0, 1]) == ""
    assert sequence.stop == "abc"


def test_min_tokens_passes_over_a_stop_string_that_completes_too_early() -> None:
    sequence = SequenceText(Spelled(["x", "ab", "y", "ab"]), StopStrings(["ab"]), min_tokens=2)
    assert [sequence.push([i]) for i in range(4)] == ["x", "ab", "y", ""]
    assert (sequence.stop, sequence.token_count) == ("ab", 3)


def test_tokens_behind_a_stop_string_are_ignored() -> None:
    sequence = SequenceText(Spelled(["STOP", "x"]), StopStrings(["STOP"]))
    assert sequence.push([0]) == sequence.push([1]) == sequence.finish() == ""
    assert sequence.ended


def test_the_hold_back_is_what_may_still_become_a_stop_string_and_no_more() -> None:
    scanner = StopScanner(StopStrings(["aab", "b!"]))
    held = []
    for character in "aaaxaa!b":
        assert scanner.feed(character) is None
        held.append(scanner.held)
    assert held == [1, 2, 2, 0, 1, 2, 0, 1]


def test_a_stop_string_in_a_character_of_several_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    params = SamplingParams(stop=("😀",), n=2)
    first, second = sequences_of(Vocabulary(tokenizer), params)
    token_ids = tokenizer.encode("ok😀 more")
    chunks = [first.push([token_id]) for token_id in token_ids]
    assert "".join(chunks) == "ok"
    assert tokenizer.decode(token_ids[: first.token_count]) == "ok"
    assert second.push(token_ids) == "ok"
    assert second.token_count == first.token_count
