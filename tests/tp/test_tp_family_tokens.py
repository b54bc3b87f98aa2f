"""Whole engines of every family: greedy tokens under arrivals, aborts, preemption and shared beginnings.

transformers judges each token: of what stood before it, no other may be better by more than `TIE`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tp.reference import FAMILIES, POSITIONS, expected, prompt_of, reference
from tests.tp.test_tp_equality import TIE, Alone, Driver
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.spec import TpSettings

pytest.importorskip("transformers")

SHARED = prompt_of(48, seed=3)


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, TpEngine]]:
    model = reference(*FAMILIES[request.param])
    model.save_pretrained(tmp_path)
    blocks = POSITIONS // 16 + 1
    engine = TpEngine(TpSettings(model=str(tmp_path), num_blocks=blocks, threads=1, max_batched_tokens=64, seed=1))
    engine.start(Alone())
    yield model, engine
    engine.close()


def test_every_token_is_the_best_that_transformers_knows(pair: tuple[Any, TpEngine]) -> None:
    model, engine = pair
    chance, driver = random.Random(5), Driver(engine)
    asked: dict[int, list[int]] = {}
    for i in range(14):
        prompt = (SHARED if i % 2 else []) + prompt_of(chance.randrange(20, 90), seed=i)
        request_id = driver.submit(prompt, max_tokens=chance.randrange(20, 60))
        asked[request_id] = prompt
        if i % 5 == 4:
            driver.abort(request_id)
            del asked[request_id]
        for _ in range(chance.randrange(2)):
            driver.step()
    driver.run()
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.kv_blocks_used == 0
    for request_id, prompt in asked.items():
        tokens = driver.tokens[request_id]
        assert len(tokens) >= 20
        logits = expected(model, prompt + tokens[:-1])[len(prompt) - 1 :]
        lag = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert float(lag.max()) < TIE, f"{len(prompt)} tokens: {int(lag.argmax())} of {len(tokens)} new ones"
