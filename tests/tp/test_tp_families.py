"""Every family against transformers on small random weights, on 1, 2 and 3 ranks: prompts whole, in chunks, and decoding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tp.ranks import Ranks
from tests.tp.reference import FAMILIES, POSITIONS, expected, forward, prompt_of, reference

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("model")
    model = reference(*FAMILIES[request.param])
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest, pair: tuple[Any, Path]) -> Iterator[Ranks]:
    with Ranks(pair[1], request.param) as ranks:
        yield ranks


def test_logits_of_a_whole_prompt(pair: tuple[Any, Path], ranks: Ranks) -> None:
    prompt = prompt_of(90)
    logits = forward(ranks, [(prompt, 0, [5, 2, 9, 7, 1, 11])])
    wanted = expected(pair[0], prompt)
    assert logits.dtype == torch.float32
    assert wanted.std() > 0.3
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_logits_in_chunks_and_token_by_token(pair: tuple[Any, Path], ranks: Ranks) -> None:
    prompt, table = prompt_of(80), [3, 1, 8, 0, 6]
    found, at = [], 0
    for size in (7, 16, 1, 1, 14, 40, 1):
        found.append(forward(ranks, [(prompt[at : at + size], at, table)]))
        at += size
    torch.testing.assert_close(torch.cat(found), expected(pair[0], prompt), atol=1e-4, rtol=0)


def test_decoding_beside_prompts_and_over_blocks_that_others_filled(pair: tuple[Any, Path], ranks: Ranks) -> None:
    """Two sequences share the blocks of the first 32 tokens, as they do after a prefix hit."""
    shared, ends = prompt_of(32), [prompt_of(length, seed=length) for length in (20, 33)]
    forward(ranks, [(shared + ends[0][:-1], 0, [0, 1, 2, 3])], rows=[])
    logits = forward(ranks, [(ends[0][-1:], 51, [0, 1, 2, 3]), (ends[1], 32, [0, 1, 9, 8, 7])])
    wanted = [expected(pair[0], shared + end) for end in ends]
    torch.testing.assert_close(logits, torch.cat([wanted[0][-1:], wanted[1][32:]]), atol=1e-4, rtol=0)


def test_the_last_position_that_a_model_has(pair: tuple[Any, Path], ranks: Ranks) -> None:
    prompt, table = prompt_of(POSITIONS), list(range(POSITIONS // 16))
    logits = forward(ranks, [(prompt, 0, table)], rows=[POSITIONS - 1])
    torch.testing.assert_close(logits, expected(pair[0], prompt)[-1:], atol=1e-4, rtol=0)


def test_bfloat16_is_no_further_from_the_exact_model_than_transformers_is(pair: tuple[Any, Path]) -> None:
    model, directory = pair
    prompt = prompt_of(64)
    rounded = type(model).from_pretrained(directory, dtype=torch.bfloat16).eval()
    exact, rough = expected(model, prompt), expected(rounded, prompt).float()
    for size in (1, 2):
        with Ranks(directory, size, dtype="bfloat16") as ranks:
            logits = forward(ranks, [(prompt, 0, [0, 1, 2, 3])])
        assert (logits - exact).abs().mean() <= 1.1 * (rough - exact).abs().mean()
