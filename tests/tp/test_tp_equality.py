"""Greedy tokens of SmolLM2 in float32 against transformers' own generate: alone, all together, and among aborts.

A row may part from the reference only where the reference's two best logits are closer than `TIE`: torch's products change
their last bits with the number of rows.
"""

import inspect
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct

from tllm_core.contracts.interfaces import EngineContext
from tllm_core.contracts.messages import EngineRequest, SamplingParams, TokenIds
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.prepare import resolve
from tllm_core.engines.tp.spec import TpSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TIE = 1e-3
NEW_TOKENS = 64
ALONE_TOKENS = int(os.environ.get("TLLM_EQUALITY_TOKENS", "16"))
"""Of each prompt alone, whose steps take as long as those of all together: NEW_TOKENS in `make soak`."""
AT_ONCE = 5
LENGTHS = (5, 6, 8, 11, 15, 16, 17, 23, 31, 32, 48, 64, 90, 127, 160, 222, 300, 411, 513, 600)
SHORT = (
    "The capital of France is",
    "Once upon a time, there lived a",
    "def fibonacci(n):\n    if n < 2:\n",
    "Water boils at a temperature of 100 degrees",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    "Dear Sir or Madam,\n\nI am writing to ask about the room that you",
    "The three primary colours are red, yellow and blue. When they are mixed",
)


class Reference(Struct):
    """One prompt, what transformers makes of it, and by how much each token was the best."""

    prompt: list[int]
    token_ids: list[int]
    margins: list[float]


class Alone(EngineContext):
    rank, world_size, rendezvous = 0, 1, None

    def wake(self) -> None: ...
    def phase(self, name: str, done: float | None = None) -> None: ...
    def adopt(self, pid: int) -> None: ...


class Driver:
    """Submits to an engine, steps it, and keeps each request's tokens."""

    def __init__(self, engine: TpEngine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.finished: set[int] = set()

    def submit(self, prompt: list[int], max_tokens: int = NEW_TOKENS) -> int:
        Driver.last_id += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineRequest(request_id=Driver.last_id, prompt_token_ids=TokenIds.of(prompt), sampling=sampling)
        self.engine.submit(request)
        self.tokens[request.request_id] = []
        return request.request_id

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)
        self.finished.add(request_id)

    def step(self) -> bool:
        step = self.engine.step()
        for output in step.outputs:
            assert output.error is None, output.error
            assert output.request_id not in self.finished, "an output after the end"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.finished.add(output.request_id)
        return step.again

    def run(self) -> None:
        while self.step():
            pass
        assert self.finished == set(self.tokens)

    last_id = 0


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve("smollm2-135m", None, lambda name, done: None)


@pytest.fixture(scope="module")
def references(model_dir: Path) -> list[Reference]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    torch.set_num_threads(1)  # the cores are shared with other tests, and threads would wait for each other
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = _prompts(lambda text: tokenizer.encode(text, add_special_tokens=False))
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    batches = [prompts[start : start + AT_ONCE] for start in range(0, len(prompts), AT_ONCE)]
    return [reference for batch in batches for reference in _references(model, batch, config)]


def _prompts(encode: Any) -> list[list[int]]:
    """One prompt per length, all different: sentences, then English and Python from the standard library's sources."""
    prose = inspect.getsource(random) + (inspect.getdoc(random) or "")
    code = inspect.getsource(json.decoder)
    texts = [*SHORT, *((prose if i % 2 else code)[i * 450 :] for i in range(len(LENGTHS) - len(SHORT)))]
    prompts = [encode(text)[:length] for text, length in zip(texts, LENGTHS, strict=True)]
    assert len({tuple(prompt) for prompt in prompts}) == len(LENGTHS)
    assert [len(prompt) for prompt in prompts[len(SHORT) :]] == list(LENGTHS[len(SHORT) :])
    assert min(len(prompt) for prompt in prompts) == 5
    return prompts


def _references(model: Any, prompts: list[list[int]], config: Any) -> list[Reference]:
    """Of prompts of like lengths, which transformers pads on their left: one row costs as much time as several."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        result = model.generate(ids, attention_mask=mask, generation_config=config)
    assert result.sequences.shape == (len(prompts), longest + NEW_TOKENS)
    best = torch.stack(result.logits, dim=1).topk(2, dim=-1).values
    margins = (best[..., 0] - best[..., 1]).tolist()
    tokens = result.sequences[:, longest:].tolist()
    return [Reference(*row) for row in zip(prompts, tokens, margins, strict=True)]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Any:
    engine = TpEngine(TpSettings(model=str(model_dir), dtype="float32", num_blocks=1400, threads=1))
    engine.start(Alone())
    yield engine
    engine.close()


def parted_at_ties(found: list[list[int]], references: list[Reference], length: int = NEW_TOKENS) -> int:
    """How many rows part from their reference, all of them at a tie. Fails for any that part elsewhere, or are not so long."""
    parted = 0
    for i, (tokens, reference) in enumerate(zip(found, references, strict=True)):
        assert len(tokens) == length
        at = next((p for p in range(length) if tokens[p] != reference.token_ids[p]), None)
        if at is not None:
            margin = reference.margins[at]
            assert margin < TIE, f"row {i} ({len(reference.prompt)} tokens) parts at {at}, margin {margin:.4f}"
            parted += 1
    return parted


def report(capsys: pytest.CaptureFixture[str], how: str, parted: int) -> None:
    with capsys.disabled():
        print(f"\n{how}: {parted} of {len(LENGTHS)} rows ended early, at a margin below {TIE}")


def test_alone_every_prompt_continues_as_in_transformers(
    engine: TpEngine, references: list[Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for reference in references:
        driver = Driver(engine)
        request_id = driver.submit(reference.prompt, ALONE_TOKENS)
        driver.run()
        found.append(driver.tokens[request_id])
    report(capsys, "alone", parted_at_ties(found, references, ALONE_TOKENS))


def test_all_together_every_prompt_continues_as_in_transformers(
    engine: TpEngine, references: list[Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Driver(engine)
    ids = [driver.submit(reference.prompt) for reference in references]
    driver.run()
    report(capsys, "together", parted_at_ties([driver.tokens[i] for i in ids], references))


def test_among_arrivals_and_aborts_every_prompt_continues_as_in_transformers(
    engine: TpEngine, references: list[Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    chance, driver = random.Random(7), Driver(engine)
    waiting = list(enumerate(references))
    chance.shuffle(waiting)
    ids: dict[int, int] = {}
    doomed: list[int] = []
    while waiting:
        for _ in range(chance.randrange(3)):
            if waiting:
                place, reference = waiting.pop()
                ids[place] = driver.submit(reference.prompt)
        if chance.random() < 0.4:
            doomed.append(driver.submit(chance.choice(references).prompt, chance.randrange(1, NEW_TOKENS)))
        if doomed and chance.random() < 0.4:
            driver.abort(doomed.pop(chance.randrange(len(doomed))))
        driver.step()
    for request_id in doomed:
        driver.abort(request_id)
    driver.run()
    assert engine.stats().kv_blocks_used == 0
    report(capsys, "among aborts", parted_at_ties([driver.tokens[ids[i]] for i in range(len(ids))], references))
