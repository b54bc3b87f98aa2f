"""An LLM whose config names an attach file is a frontend of an engine that others use too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tllm_core import LLM, ConfigError, ExecutorClosedError, GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens
from tllm_core.text import Tokenizer

FEW = SamplingParams(max_tokens=4)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(engine="echo", transport="zmq") as owner:
        owner.write_attach_file(tmp_path / "engine.json")
        (tmp_path / "tllm.toml").write_text(f'[attach]\nfile = "{tmp_path / "engine.json"}"\n')
        yield owner


def test_it_attaches_and_its_end_leaves_the_engine_alone(owner: GenerationExecutor, tmp_path: Path) -> None:
    with LLM(config=tmp_path / "tllm.toml") as llm:
        assert llm.executor.info == owner.info
        assert [rank.pid for rank in llm.executor.health().ranks] == [rank.pid for rank in owner.health().ranks]
        assert llm.generate([1, 2], FEW).outputs[0].token_ids == expected_tokens([1, 2], 4)
    assert owner.generate([1, 2], FEW).finished  # type: ignore[union-attr]


def test_what_starts_an_engine_is_refused_besides(owner: GenerationExecutor, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attach.file is set .*, so engine, engine_options can't be chosen"):
        LLM("a-model", engine="tp", config=tmp_path / "tllm.toml")


def test_before_its_end_it_takes_no_new_prompts(owner: GenerationExecutor, tmp_path: Path) -> None:
    with LLM(config=tmp_path / "tllm.toml") as llm:
        output = llm.generate_async([1, 2], FEW)
        llm.pre_shutdown()
        with pytest.raises(ExecutorClosedError, match="is shutting down"):
            llm.generate([1, 2])
        assert output.result(30).outputs[0].token_ids == expected_tokens([1, 2], 4)


def test_a_borrowed_executor_goes_on_for_others(owner: GenerationExecutor, tokenizer: Tokenizer) -> None:
    llm = LLM(executor=owner, tokenizer=tokenizer)
    llm.pre_shutdown()
    with pytest.raises(ExecutorClosedError, match="this LLM is shutting down"):
        llm.generate("hello")
    assert owner.generate([1, 2], FEW).finished  # type: ignore[union-attr]
