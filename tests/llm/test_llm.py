"""LLM over the echo engine: text goes in and out through a real executor."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tllm_core import (
    LLM,
    ConfigError,
    ExecutorClosedError,
    GenerationExecutor,
    ModelError,
    RequestError,
    SamplingParams,
)
from tllm_core.engines.echo import expected_tokens
from tllm_core.text import Tokenizer

INLINE: dict[str, Any] = {"engine": "echo", "transport": "inproc", "launcher": "inline"}
EIGHT = SamplingParams(max_tokens=8)


def answer(tokenizer: Tokenizer, prompt: str, count: int, index: int = 0, skip: bool = True) -> str:
    ids = expected_tokens(tokenizer.encode(prompt), count, index, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(ids, skip_special_tokens=skip)


# --------------------------------------------------------------------------------------------------------- shapes


def test_generate_keeps_the_shape_of_its_input(llm: LLM, tokenizer: Tokenizer) -> None:
    one = llm.generate("fox", EIGHT)
    assert one.outputs[0].text == answer(tokenizer, "fox", 8)
    assert (one.prompt, one.prompt_token_ids.tolist(), one.finished) == ("fox", tokenizer.encode("fox"), True)
    many = llm.generate(["fox", tokenizer.encode("brown")], [EIGHT, SamplingParams(max_tokens=3)])
    assert [each.outputs[0].text for each in many] == [answer(tokenizer, "fox", 8), answer(tokenizer, "brown", 3)]
    assert many[1].prompt is None
    assert llm.generate([]) == []
    by_ids = llm.generate(tokenizer.encode("fox"), EIGHT)
    assert by_ids.outputs[0].text == one.outputs[0].text


def test_streamed_text_concatenates_to_the_whole(llm: LLM, tokenizer: Tokenizer) -> None:
    output = llm.generate_async("the fox", SamplingParams(max_tokens=200, skip_special_tokens=False))
    chunks = [update.outputs[0].text_diff for update in output]
    assert "".join(chunks) == output.outputs[0].text == answer(tokenizer, "the fox", 200, skip=False)
    assert output.outputs[0].finish_reason == "length"


def test_coroutines_stream_and_wait(llm: LLM, tokenizer: Tokenizer) -> None:
    async def stream(prompt: str) -> str:
        return "".join([update.outputs[0].text_diff async for update in llm.generate_async(prompt, EIGHT)])

    async def main() -> list[str]:
        return await asyncio.gather(*(stream(f"fox {i}") for i in range(20)))

    async def wait() -> str:
        return (await llm.generate_async("fox", EIGHT)).outputs[0].text

    assert asyncio.run(main()) == [answer(tokenizer, f"fox {i}", 8) for i in range(20)]
    assert asyncio.run(wait()) == answer(tokenizer, "fox", 8)


def test_several_sequences_have_each_their_text(llm: LLM, tokenizer: Tokenizer) -> None:
    output = llm.generate("fox", SamplingParams(max_tokens=8, n=3))
    assert [one.text for one in output.outputs] == [answer(tokenizer, "fox", 8, index) for index in range(3)]


def test_the_engines_defaults_are_used_where_no_parameters_are_given(llm: LLM) -> None:
    output = llm.generate("fox")
    assert len(output.outputs[0].token_ids) + len(output.prompt_token_ids) == llm.executor.info.max_seq_len


def test_parameters_may_be_a_mapping(llm: LLM, tokenizer: Tokenizer) -> None:
    assert llm.generate("fox", {"max_tokens": 3}).outputs[0].text == answer(tokenizer, "fox", 3)


# ---------------------------------------------------------------------------------------------------------- stops


@pytest.fixture(scope="session", params=[1, 4])
def stepping(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**INLINE, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, tokens_per_step=request.param) as llm:
        yield llm


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_trims_text_ids_and_logprobs_alike_for_any_step_size(
    stepping: LLM, tokenizer: Tokenizer, include: bool
) -> None:
    ids = expected_tokens(tokenizer.encode("fox"), 60, vocab_size=tokenizer.vocab_size)
    before, stop = tokenizer.decode(ids[:40]), tokenizer.decode(ids[40:44])
    assert stop not in tokenizer.decode(ids[:43])
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include, logprobs=1)
    output = stepping.generate_async("fox", params)
    updates = [(update.outputs[0].text_diff, update.outputs[0].token_ids_diff) for update in output]
    one = output.outputs[0]
    assert "".join(text for text, _ in updates) == one.text == before + (stop if include else "")
    assert [token for _, diff in updates for token in diff] == one.token_ids == ids[: 44 if include else 40]
    assert [len(one.logprobs or ()), one.finish_reason, one.stop_reason] == [len(one.token_ids), "stop", stop]
    assert not output.aborted()


def test_generate_ends_each_prompt_at_its_own_stop_string(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts = [f"fox {i}" for i in range(40)]
    texts = [answer(tokenizer, prompt, 30) for prompt in prompts]
    stops = [text[5:8] for text in texts]
    outputs = llm.generate(prompts, [SamplingParams(stop=(stop,)) for stop in stops])
    for text, stop, output in zip(texts, stops, outputs, strict=True):
        one = output.outputs[0]
        assert (one.text, one.finish_reason, one.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert llm.executor.health().in_flight == 0


def test_an_engine_that_can_t_include_a_stop_token_is_not_asked_in_vain(llm: LLM) -> None:
    """Where it is about stop strings alone the engine need not know of it; else ignoring it would be a wrong answer."""
    for stops in ({"stop_token_ids": (5,)}, {"stop_token_ids": (5,), "stop": ("x",)}, {}):
        with pytest.raises(RequestError, match="does not support include_stop_str_in_output") as caught:
            llm.generate("fox", SamplingParams(max_tokens=8, include_stop_str_in_output=True, **stops))
        assert caught.value.field == "include_stop_str_in_output"
    llm.generate("fox", SamplingParams(max_tokens=8, include_stop_str_in_output=True, stop=("x",)))


def test_min_tokens_reaches_engine_and_text(llm: LLM, tokenizer: Tokenizer) -> None:
    first = answer(tokenizer, "fox", 1)
    one = llm.generate("fox", SamplingParams(stop=(first,), min_tokens=1, max_tokens=2)).outputs[0]
    assert (one.finish_reason, len(one.token_ids)) == ("length", 2)


# ------------------------------------------------------------------------------------------------------------ chat


def test_chat_renders_the_template_and_adds_no_second_special_tokens(llm: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "fox?"}]
    output = llm.chat(messages, EIGHT)
    assert output.prompt == "<|user|>fox?<|end|><|assistant|>"
    assert output.prompt_token_ids.tolist() == tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.outputs[0].text == answer(tokenizer, output.prompt, 8)
    streamed = llm.chat_async(messages, EIGHT, add_generation_prompt=False, template_variables={"mood": "!"})
    assert streamed.prompt == "<|user|>fox?<|end|>!"
    assert len(llm.chat([messages, messages], EIGHT)) == 2


def test_a_malformed_message_is_a_request_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.role"):
        llm.chat([{"content": "x"}])


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", None, "prompt"),
        ("\ud800", None, "prompt"),
        (5, None, "prompt_token_ids"),
        ("fox", SamplingParams(stop=("",)), "stop"),
        ("fox", {"maximum": 3}, "maximum"),
        ("fox", SamplingParams(max_tokens=10**6), "max_tokens"),
    ],
)
def test_bad_input_is_a_request_error_that_names_the_field(llm: LLM, prompt: Any, params: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate_async(prompt, params)
    assert caught.value.field == field
    assert llm.executor.health().in_flight == 0


def test_wrong_options_and_numbers_of_parameters_are_request_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match="top_kk is no option"):
        llm.generate_async("fox", top_kk=3)
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [EIGHT])
    with pytest.raises(RequestError, match="not int"):
        llm.generate(["a"], 5)  # type: ignore[call-overload]


def test_one_bad_prompt_among_many_aborts_the_others(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fox", ""], SamplingParams())
    assert llm.executor.health().in_flight == 0


# ----------------------------------------------------------------------------------------------- without tokenizer


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    with LLM(**INLINE) as llm:
        one = llm.generate([1, 2, 3], EIGHT).outputs[0]
        assert (one.text, one.token_ids) == ("", expected_tokens([1, 2, 3], 8))
        for call in (lambda: llm.generate("fox"), lambda: llm.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(RequestError, match=r"has no tokenizer: give token ids, or LLM\(tokenizer=...\)"):
                call()
        with pytest.raises(RequestError, match="stop strings are found in text"):
            llm.generate([1], SamplingParams(stop=("x",)))
        with pytest.raises(RequestError, match="has no tokenizer"):
            _ = llm.tokenizer
        assert llm.model_dir is None


# ------------------------------------------------------------------------------------------------------ life cycle


def test_a_borrowed_executor_is_left_running(tokenizer: Tokenizer) -> None:
    with GenerationExecutor.create(**INLINE) as executor:
        with LLM(executor=executor, tokenizer=tokenizer) as llm:
            assert llm.generate([1], EIGHT).finished
        assert executor.check_health()
        with pytest.raises(ConfigError, match="engine, transport can't be chosen"):
            LLM(executor=executor, engine="echo", transport="zmq")


def test_an_own_executor_ends_with_the_llm() -> None:
    with LLM(**INLINE) as llm:
        pass
    assert not llm.executor.check_health()
    with pytest.raises(ExecutorClosedError):
        llm.generate_async([1])
    llm.shutdown()


def test_a_tokenizer_that_cannot_be_loaded_ends_the_engine_again(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="has no tokenizer"):
        LLM(**INLINE, tokenizer=tmp_path)
    assert set(threading.enumerate()) <= before


def test_the_configs_engine_goes_before_the_default(tmp_path: Path) -> None:
    config = tmp_path / "tllm.toml"
    config.write_text('[engine]\nname = "echo"\n[transport]\nname = "inproc"\n[launcher]\nname = "inline"\n')
    with LLM(config=config, vocab_size=77) as llm:
        assert llm.executor.info.vocab_size == 77
    with pytest.raises(ConfigError, match="model"):
        LLM("some-model", config=config)


def test_one_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="x") == SamplingParams(stop=("x",))  # type: ignore[arg-type]


def test_a_mapping_is_no_sequence_of_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompts must be"):
        llm.generate({"prompt": "hi"})  # type: ignore[call-overload]
