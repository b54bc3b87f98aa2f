"""Real worlds of several ranks answer as one rank does, whatever they meet over, and do what they are told together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conformance.test_engines import save_tiny_model
from tllm_core import ControlError, EngineStartError, GenerationExecutor, SamplingParams
from tllm_core.engines.tp.prepare import resolve

pytestmark = pytest.mark.timeout(600)

PROMPTS = [list(range(3 + i, 3 + i + length)) for i, length in enumerate((1, 2, 7, 16, 17, 40, 70, 33, 5))]
"""The longer ones are computed in chunks beside the others' decoding."""
TIE = 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


def world(model: Path | str, size: int, comm: str = "auto", **settings: Any) -> GenerationExecutor:
    options = {"model": str(model), "tensor_parallel_size": size, "comm": comm, "threads": 1, "num_blocks": 64}
    return GenerationExecutor.create(
        engine="tp",
        engine_options={**options, "max_seq_len": 192, "max_num_seqs": 6, "max_batched_tokens": 32} | settings,
    )


def answers(executor: GenerationExecutor, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    results = [executor.generate_async(prompt, sampling) for prompt in prompts]
    return [list(result.result(120).outputs[0].token_ids) for result in results]


def check_greedy(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the reference's best, or as good up to a tie of its two best."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits[range(len(tokens)), tokens]
    assert (best - chosen < TIE).all(), f"{tokens} after {prompt} falls behind by {(best - chosen).max()}"


@pytest.mark.parametrize(("size", "comm"), [(2, "shm"), (3, "shm"), (2, "gloo"), (3, "gloo")])
def test_several_ranks_give_the_tokens_of_transformers(tiny: Path, size: int, comm: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with world(tiny, size, comm) as executor:
        assert len(executor.health().ranks) == size
        tokens = answers(executor, PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
        for prompt, found in zip(PROMPTS, tokens, strict=True):
            assert len(found) == 20
            check_greedy(reference, prompt, found)
        seeded = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7)
        assert answers(executor, PROMPTS[:4], seeded) == answers(executor, PROMPTS[:4], seeded)
        assert executor.stats().kv_blocks_used == 0


def test_all_ranks_do_what_they_are_told_together(tiny: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    with world(tiny, 2) as executor:
        before = answers(executor, PROMPTS, sampling)

        traces = tmp_path / "traces"
        assert executor.control("start_profile", str(traces)) == [str(traces)] * 2
        executor.control("pause")
        waits = executor.generate_async(PROMPTS[0], sampling)
        with pytest.raises(TimeoutError):
            waits.result(0.2)
        with pytest.raises(ControlError, match="is refused: the engine has 1 request"):
            executor.control("sleep", 2)
        assert executor.control("resume") == [None, None]
        assert list(waits.result(60).outputs[0].token_ids) == before[0]
        paths = executor.control("stop_profile")
        assert len(set(paths)) == 2
        assert all(json.loads(Path(str(path)).read_text())["traceEvents"] for path in paths)

        assert executor.control("sleep", 2) == [None, None]
        assert executor.control("wakeup") == [None, None]
        assert answers(executor, PROMPTS, sampling) == before
        assert executor.control("update_weights", str(tiny)) == [None, None]
        assert len(executor.control("reset_caches", ranks=[1])) == 1
        with pytest.raises(ControlError, match="no rank 2"):
            executor.control("reset_caches", ranks=[2])
        (tmp_path / "empty").mkdir()
        with pytest.raises(ControlError, match="empty"):
            executor.control("update_weights", str(tmp_path / "empty"))
        assert answers(executor, PROMPTS, sampling) == before


def test_more_ranks_than_heads_are_refused_with_the_numbers(tiny: Path) -> None:
    with pytest.raises(EngineStartError, match="tensor_parallel_size 5 is more than the 4 heads"):
        world(tiny, 5)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_smollm2_on_three_ranks_gives_the_tokens_of_transformers() -> None:
    directory = resolve("smollm2-135m", None, lambda name, done: None)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [[1, 504, 3575, 282, 4649, 314], list(range(1000, 1090)), [7, 8, 9] * 20]
    with world(directory, 3, max_seq_len=256, max_batched_tokens=64) as executor:
        tokens = answers(executor, prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    for prompt, found in zip(prompts, tokens, strict=True):
        assert len(found) == 24
        check_greedy(reference, prompt, found)
