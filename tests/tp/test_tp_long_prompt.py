"""A long prompt is an int32 buffer all the way through the engine: no list of its tokens is ever made."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from tests.tp.conftest import save_tiny_llama
from tests.tp.test_tp_engine import Context
from tllm_core.contracts.messages import EngineRequest, SamplingParams, TokenIds
from tllm_core.engines.tp import TpSettings
from tllm_core.engines.tp.engine import TpEngine

LENGTH, VOCAB = 30_000, 2048
BUFFER = 4 * LENGTH
LIST = (8 + 28) * LENGTH
"""Bytes of a list of as many integers that are not small ones."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TpEngine]:
    directory = save_tiny_llama(
        tmp_path_factory.mktemp("long"),
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH + 100,
    )
    engine = TpEngine(TpSettings(model=str(directory), threads=1, max_batched_tokens=2048, kv_events=0))
    engine.start(Context())
    yield engine
    engine.close()


def ask(engine: TpEngine, request_id: int, prompt: TokenIds) -> None:
    sampling = SamplingParams(
        max_tokens=3, ignore_eos=True, repetition_penalty=1.1, logprobs=1, bad_token_sequences=((5, 6), (7,)), seed=1
    )
    engine.submit(EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    while engine.step().again:
        pass


def test_no_list_of_a_long_prompts_tokens_is_made(engine: TpEngine) -> None:
    numbers = np.random.default_rng(0).integers(300, VOCAB, LENGTH, dtype=np.int32)
    prompt = TokenIds.of(numbers)
    ask(engine, 1, TokenIds.of(numbers[:50]))  # what is made once is there then
    tracemalloc.start()
    try:
        ask(engine, 2, prompt)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert engine.stats().generated_tokens == 6
    assert BUFFER < peak < LIST  # which hashes of its blocks are in, too


def test_a_list_would_be_seen(engine: TpEngine) -> None:
    prompt = TokenIds.of(np.full(LENGTH, 1000, dtype=np.int32))
    tracemalloc.start()
    try:
        values = [token + request for request, token in enumerate(prompt)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(values) == LENGTH
    assert peak > LIST * 0.9
