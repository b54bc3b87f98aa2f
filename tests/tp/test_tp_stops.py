"""What ends a sequence is in its tokens, text and logprobs where that is asked for, and else in none of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.tp.test_tp_engine import first_seen, with_eos
from tllm_core import LLM, SamplingParams

PROMPT = list(range(3, 20))
DRAWN: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "logprobs": 0}
BEFORE = 6


def llm_on(directory: Path) -> LLM:
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.no_truncation()
    options = {"num_blocks": 32, "threads": 1, "guided": False}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return LLM(directory, tokenizer=tokenizer, transport="inproc", launcher="inline", **options)


@pytest.fixture(scope="module")
def whole(text_model_dir: Path) -> list[int]:
    """What comes where nothing ends it."""
    with llm_on(text_model_dir) as llm:
        tokens: list[int] = llm.generate(PROMPT, SamplingParams(ignore_eos=True, **DRAWN)).outputs[0].token_ids
    assert len(tokens) == 40
    return tokens


@pytest.fixture(scope="module")
def end(whole: list[int]) -> int:
    """The place of a token that ends the sequence: it is its first of this kind."""
    return first_seen(whole, BEFORE)


@pytest.fixture(scope="module", params=["a stop token", "the model's end"])
def ending(
    request: pytest.FixtureRequest,
    text_model_dir: Path,
    whole: list[int],
    end: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LLM, dict[str, Any], int | None]]:
    """An LLM, what to ask it for, and the stop_reason that is told then."""
    directory, asked, reason = text_model_dir, {"stop_token_ids": (whole[end],), "ignore_eos": True}, whole[end]
    if request.param == "the model's end":
        directory = with_eos(text_model_dir, tmp_path_factory.mktemp("eos") / "model", whole[end])
        asked, reason = {}, None
    with llm_on(directory) as llm:
        yield llm, asked, reason


@pytest.mark.parametrize("included", [False, True])
def test_a_token_that_ends_is_part_of_what_it_ends_only_on_request(
    ending: tuple[LLM, dict[str, Any], int | None], whole: list[int], end: int, included: bool
) -> None:
    llm, asked, reason = ending
    params = SamplingParams(include_stop_str_in_output=included, **asked, **DRAWN)
    expected = whole[: end + included]
    for output in (llm.executor.generate(PROMPT, params), llm.generate(PROMPT, params)):
        one = output.outputs[0]
        assert one.token_ids == expected
        assert (one.finish_reason, one.stop_reason) == ("stop", reason)
        assert [set(position) for position in one.logprobs] == [{token} for token in expected]
    assert one.text == llm.tokenizer.decode(expected)
    streamed = llm.generate_async(PROMPT, params)
    assert "".join(update.outputs[0].text_diff for update in streamed) == one.text
    assert streamed.outputs[0].token_ids == expected


@pytest.mark.parametrize("included", [False, True])
def test_beside_stop_strings_a_stop_token_is_still_itself(
    ending: tuple[LLM, dict[str, Any], int | None], whole: list[int], end: int, included: bool
) -> None:
    """One that never comes, and one that is complete before the token."""
    llm, asked, reason = ending
    for stop, tokens, why in (("never this", whole[: end + included], reason), *_earlier(llm, whole[:end], included)):
        params = SamplingParams(include_stop_str_in_output=included, stop=(stop,), **asked, **DRAWN)
        one = llm.generate(PROMPT, params).outputs[0]
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (tokens, "stop", why)


def _earlier(llm: LLM, before: list[int], included: bool) -> Iterator[tuple[str, list[int], str]]:
    for at in range(1, len(before)):
        stop = llm.tokenizer.decode(before[at : at + 1])
        if stop.isprintable() and "\ufffd" not in stop and stop not in llm.tokenizer.decode(before[:at]):
            yield stop, before[: at + included], stop
            return
    raise AssertionError(f"no token of {before} is a text of its own")
