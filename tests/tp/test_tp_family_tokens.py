"""Whole engines of every family, of one rank and of several: tokens under arrivals, aborts, preemption and shared beginnings.

transformers judges each token: of what stood before it, no other may be better by more than `TIE`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tp.ranks import engine_of
from tests.tp.reference import FAMILIES, expected, prompt_of, reference
from tests.tp.test_tp_equality import TIE, Driver
from tllm_core.engines.tp.engine import TpEngine

pytest.importorskip("transformers")

SHARED = prompt_of(48, seed=3)
BLOCKS = 13
"""What the longest request needs."""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("model")
    model = reference(*FAMILIES[request.param])
    model.save_pretrained(directory)
    return model, directory


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_token_is_the_best_that_transformers_knows_and_nothing_is_left(
    model: tuple[Any, Path], size: int
) -> None:
    judge, directory = model
    with engine_of(directory, size, num_blocks=BLOCKS, max_batched_tokens=64, seed=1) as engine:
        driver = Driver(engine)
        asked = ask(driver, requests=14 if size == 1 else 11)
        driver.run()
        check_empty(engine)
    for request_id, prompt in asked.items():
        tokens = driver.tokens[request_id]
        assert len(tokens) >= 30
        logits = expected(judge, prompt + tokens[:-1])[len(prompt) - 1 :]
        lag = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert float(lag.max()) < TIE, f"{len(prompt)} tokens: {int(lag.argmax())} of {len(tokens)} new ones"


def ask(driver: Driver, requests: int) -> dict[int, list[int]]:
    """The prompts of those that were not aborted."""
    chance, asked = random.Random(5), dict[int, list[int]]()
    for i in range(requests):
        prompt = (
            SHARED + prompt_of(chance.randrange(2, 90), seed=i)
            if i % 3 == 1
            else prompt_of(chance.randrange(2, 20), seed=i)
        )
        request_id = driver.submit(prompt, max_tokens=chance.randrange(30, 60))
        asked[request_id] = prompt
        if i % 5 == 4:
            driver.abort(request_id)
            del asked[request_id]
        for _ in range(chance.randrange(2)):
            driver.step()
    return asked


def check_empty(engine: TpEngine) -> None:
    """All kinds of trouble were met, and every table is as it was before the first request."""
    stats, tables = engine.stats(), engine._scheduler.tables
    assert stats.preemptions > 0
    assert stats.extra["cache_hits"] > 0
    assert (stats.running, stats.waiting, stats.kv_blocks_used, engine.live) == (0, 0, 0, 0)
    assert [tables.pool.references(block) for block in range(BLOCKS)] == [0] * BLOCKS
    assert (tables.copies, tables.suspects) == ([], [])
    engine.control("reset_prefix_cache", [], None)
    assert engine.stats().extra["kv_blocks_cached"] == 0
