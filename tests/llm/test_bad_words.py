"""Which token ids bad words are made into."""

import pytest

from tllm_core import LLM, RequestError, SamplingParams
from tllm_core.text import Tokenizer, token_sequences


def test_a_word_is_kept_out_at_the_start_of_a_text_and_behind_a_space(tokenizer: Tokenizer) -> None:
    runs = token_sequences(tokenizer, ["fox", " quick", "fox"])
    texts = [tokenizer.decode(run) for run in runs]
    assert texts == ["fox", " fox", "quick", " quick"]
    assert len(set(runs)) == 4


@pytest.mark.parametrize("word", ["  ", "\ud800"])
def test_what_is_no_word_is_refused(tokenizer: Tokenizer, word: str) -> None:
    with pytest.raises(RequestError, match="bad_words") as caught:
        token_sequences(tokenizer, [word])
    assert caught.value.field == "bad_words"


def test_an_engine_that_knows_none_refuses_their_tokens(llm: LLM) -> None:
    with pytest.raises(RequestError, match="does not support bad_token_sequences"):
        llm.generate("fox", SamplingParams(bad_words=("fox",)))


def test_best_of_is_refused_with_stop_strings_and_in_a_stream(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        llm.generate("fox", SamplingParams(best_of=3, stop=("x",)))
    assert caught.value.field == "best_of"
    with pytest.raises(RequestError, match="can't be streamed") as caught:
        llm.generate_async("fox", SamplingParams(best_of=3))
    assert caught.value.field == "best_of"
    with pytest.raises(RequestError, match="does not support best_of"):
        llm.generate("fox", SamplingParams(best_of=3))
