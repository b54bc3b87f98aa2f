"""Greedy tokens of SmolLM2 in float32 against transformers: alone, all together, and among aborts.

transformers judges each token by what stood before it, so that the first that it would not have chosen is found, and each one
after it. None may be worse than its best by `TIE` or more: torch's products change their last bits with the number of rows.
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


class Judged(Struct):
    """What has followed a prompt, and by how much transformers knew a better one than each of these."""

    token_ids: list[int]
    lags: list[float]


class Judge:
    """transformers' model. What begins as something that it has judged before costs nothing more."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._judged: dict[tuple[int, ...], Judged] = {}

    def lags(self, prompt: list[int], token_ids: list[int]) -> list[float]:
        """By how much the best logit exceeds that of each token, given all before it; 0.0 is the choice of transformers."""
        judged = self._judged.get(tuple(prompt))
        if judged is None or judged.token_ids[: len(token_ids)] != token_ids:
            judged = self._judged[tuple(prompt)] = Judged(token_ids, self._compute(prompt, token_ids))
        return judged.lags[: len(token_ids)]

    def _compute(self, prompt: list[int], token_ids: list[int]) -> list[float]:
        given = torch.tensor([[*prompt, *token_ids[:-1]]])
        with torch.inference_mode():
            logits = self._model(given, use_cache=False, logits_to_keep=len(token_ids)).logits[0]
        chosen = logits.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
        lags: list[float] = (logits.max(dim=-1).values - chosen).tolist()
        return lags


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
def prompts(model_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return _prompts(lambda text: tokenizer.encode(text, add_special_tokens=False))


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


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Any:
    engine = TpEngine(TpSettings(model=str(model_dir), dtype="float32", num_blocks=1400, threads=1))
    engine.start(Alone())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine: TpEngine, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt continues with when there is no other."""
    found = []
    for prompt in prompts:
        driver = Driver(engine)
        request_id = driver.submit(prompt, ALONE_TOKENS)
        driver.run()
        found.append(driver.tokens[request_id])
    return found


@pytest.fixture(scope="module")
def together(engine: TpEngine, prompts: list[list[int]], alone: list[list[int]]) -> list[list[int]]:
    """What all continue with at once; after `alone`, which found nothing computed."""
    driver = Driver(engine)
    ids = [driver.submit(prompt) for prompt in prompts]
    driver.run()
    return [driver.tokens[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def judge(model_dir: Path, prompts: list[list[int]], together: list[list[int]]) -> Judge:
    """It has seen the longest rows, of which most others are beginnings."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the cores are shared with other tests, and threads would wait for each other
    judge = Judge(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    for prompt, tokens in zip(prompts, together, strict=True):
        judge.lags(prompt, tokens)
    return judge


def parted_at_ties(judge: Judge, prompts: list[list[int]], found: list[list[int]], length: int = NEW_TOKENS) -> int:
    """How many rows have a token that transformers would not have chosen, each at a tie. Fails for any elsewhere."""
    parted = 0
    for i, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        assert len(tokens) == length
        lags = judge.lags(prompt, tokens)
        assert len(lags) == length
        worst = max(lags)
        assert worst < TIE, f"row {i} ({len(prompt)} tokens) parts at {lags.index(worst)}, {worst:.4f} below the best"
        parted += worst > 0
    return parted


def report(capsys: pytest.CaptureFixture[str], how: str, parted: int) -> None:
    with capsys.disabled():
        print(f"\n{how}: {parted} of {len(LENGTHS)} rows have another token, at a margin below {TIE}")


def test_alone_every_prompt_continues_as_in_transformers(
    judge: Judge, prompts: list[list[int]], alone: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    report(capsys, "alone", parted_at_ties(judge, prompts, alone, ALONE_TOKENS))


def test_all_together_every_prompt_continues_as_in_transformers(
    judge: Judge, prompts: list[list[int]], together: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    report(capsys, "together", parted_at_ties(judge, prompts, together))


def test_among_arrivals_and_aborts_every_prompt_continues_as_in_transformers(
    engine: TpEngine, judge: Judge, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    chance, driver = random.Random(7), Driver(engine)
    waiting = list(enumerate(prompts))
    chance.shuffle(waiting)
    ids: dict[int, int] = {}
    doomed: list[int] = []
    while waiting:
        for _ in range(chance.randrange(3)):
            if waiting:
                place, prompt = waiting.pop()
                ids[place] = driver.submit(prompt)
        if chance.random() < 0.4:
            doomed.append(driver.submit(chance.choice(prompts), chance.randrange(1, NEW_TOKENS)))
        if doomed and chance.random() < 0.4:
            driver.abort(doomed.pop(chance.randrange(len(doomed))))
        driver.step()
    for request_id in doomed:
        driver.abort(request_id)
    driver.run()
    assert engine.stats().kv_blocks_used == 0
    found = [driver.tokens[ids[i]] for i in range(len(ids))]
    report(capsys, "among aborts", parted_at_ties(judge, prompts, found))
