"""LLM over the real model: its own tokenizer, chat template and end of text."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_core import LLM, GuidedDecoding, SamplingParams
from tllm_core.text import Vocabulary

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", dtype="float32", transport="inproc", launcher="inline") as llm:
        yield llm


def test_it_answers_in_text_that_streams_and_ends_by_itself(llm: LLM) -> None:
    output = llm.chat_async(QUESTION, SamplingParams(max_tokens=64))
    chunks = [update.outputs[0].text_diff for update in output]
    one = output.outputs[0]
    assert "".join(chunks) == one.text == "The capital of France is Paris."
    assert one.text == llm.tokenizer.decode(one.token_ids)
    assert (one.finish_reason, one.stop_reason) == ("stop", None)


def test_special_tokens_are_shown_on_request(llm: LLM) -> None:
    one = llm.chat(QUESTION, SamplingParams(max_tokens=64, skip_special_tokens=False)).outputs[0]
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=False)


def test_a_stop_string_ends_it_earlier(llm: LLM) -> None:
    one = llm.chat(QUESTION, SamplingParams(max_tokens=64, stop=("France is",))).outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("The capital of ", "stop", "France is")
    assert llm.tokenizer.decode(one.token_ids) == "The capital of France"  # its space belongs to the text that is kept


def test_bad_words_come_in_no_place(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24)
    assert "Paris" in llm.chat(QUESTION, params).outputs[0].text
    without = llm.chat(QUESTION, SamplingParams(max_tokens=24, bad_words=("Paris", "capital"))).outputs[0].text
    assert without
    assert "Paris" not in without
    assert "capital" not in without


def test_an_answer_matches_its_schema_and_is_cut_only_where_max_tokens_says_so(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["city", "village"]},
            "people": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
        },
        "required": ["city", "kind", "people"],
        "additionalProperties": False,
    }
    question = [{"role": "user", "content": "Describe Paris as JSON with city, kind and people."}]
    guided = GuidedDecoding(json=json.dumps(schema), whitespace=False)
    for params in (SamplingParams(guided=guided), SamplingParams(guided=guided, temperature=1.0, seed=3, n=2)):
        for one in llm.chat(question, params).outputs:
            assert one.finish_reason == "stop"
            answer = json.loads(one.text)
            assert set(answer) == {"city", "kind", "people"}
            assert len(answer["city"]) <= 12
            assert answer["kind"] in ("city", "village")
            assert 0 <= answer["people"] <= 10_000_000
    cut = llm.chat(question, SamplingParams(guided=guided, max_tokens=4)).outputs[0]
    assert (len(cut.token_ids), cut.finish_reason) == (4, "length")
    assert llm.chat(QUESTION, SamplingParams(guided={"choice": ["Rome", "Paris"]})).outputs[0].text == "Paris"  # type: ignore[arg-type]


def test_the_resolved_directory_holds_the_tokenizer(llm: LLM) -> None:
    assert llm.model_dir is not None
    assert llm.executor.info.tokenizer == llm.model_dir
    assert llm.tokenizer.byte_level


@given(choices=st.lists(st.integers(0, 2**31 - 1), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_the_real_vocabulary_stream_to_their_one_shot_decode(
    llm: LLM, choices: list[int], skip: bool
) -> None:
    tokenizer = llm.tokenizer
    detokenizer = Vocabulary(tokenizer).detokenizer(skip)
    ids = [choice % (tokenizer.vocab_size + 2) for choice in choices]
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == tokenizer.decode(ids, skip)
