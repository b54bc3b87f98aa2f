"""Engines on the stand-in of FlashInfer, and what they generate."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct, field
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tp.flashinfer_stand_in import FlashInferStandIn, Tape
from tllm_core.contracts.interfaces import EngineContext
from tllm_core.contracts.messages import EngineRequest, SamplingParams, TokenIds
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.kernels import FlashInferKernels
from tllm_core.engines.tp.spec import TpSettings

VOCAB = 320


class Alone(EngineContext):
    rank, world_size, rendezvous = 0, 1, None

    def wake(self) -> None: ...
    def phase(self, name: str, done: float | None = None) -> None: ...
    def adopt(self, pid: int) -> None: ...


class Generated(Struct):
    """What came for one request. prompt, own: the logarithms of the probabilities of its prompt's tokens, but the first, and
    of those in `token_ids`; margins: by how much these were likelier than the next best."""

    token_ids: list[int] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def save_model(directory: Path, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> Path:
    """A tiny Llama whose heads are as wide as FlashInfer's kernels want them."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@contextmanager
def bfloat16_everywhere() -> Iterator[None]:
    """The engine computes in float32 on CPUs without bfloat16; FlashInfer can't, and the two must round alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tllm_core.engines.tp.linear.has_native_bfloat16", lambda: True)
        yield


@contextmanager
def engine_on(
    directory: Path,
    stand_in: FlashInferStandIn | None,
    tape: Tape | None = None,
    batch_invariant: bool = False,
    **settings: Any,
) -> Iterator[TpEngine]:
    """On torch where there is no stand-in."""
    own = {"model": str(directory), "dtype": "bfloat16", "device": "cpu", "threads": 1, "num_blocks": 64} | settings
    with pytest.MonkeyPatch.context() as patch, bfloat16_everywhere():
        if stand_in is not None:
            recorder = None if tape is None else lambda device: tape

            def choose(settings: TpSettings, *_: object) -> FlashInferKernels:
                return FlashInferKernels(stand_in, settings, recorder, batch_invariant=batch_invariant)

            patch.setattr("tllm_core.engines.tp.runner.choose", choose)
        engine = TpEngine(TpSettings(**own))
        engine.start(Alone())
        try:
            yield engine
        finally:
            engine.close()


def prompts(count: int, seed: int = 0, longest: int = 70, vocab: int = VOCAB) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, vocab) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def generate(engine: TpEngine, requests: list[list[int]], new_tokens: int = 12) -> list[Generated]:
    """They arrive two at a time, a step apart, so that prompts and decoding meet in one batch."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    found = {i: Generated() for i in range(len(requests))}
    waiting, again = list(enumerate(requests)), True
    while waiting or again:
        for i, prompt in waiting[:2]:
            ids = TokenIds.of(prompt)
            engine.submit(EngineRequest(request_id=i, prompt_token_ids=ids, sampling=sampling))
        waiting = waiting[2:]
        step = engine.step()
        again = step.again
        for output in step.outputs:
            assert output.error is None, output.error
            _note(found[output.request_id], output)
    assert all(len(g.token_ids) == new_tokens for g in found.values())
    return list(found.values())


def _note(generated: Generated, output: Any) -> None:
    generated.token_ids += output.token_ids
    generated.prompt += [entries[0].logprob for entries in (output.prompt_logprobs or ())[1:]]
    for entries in output.logprobs or ():
        own, best, second = entries
        generated.own.append(own.logprob)
        generated.margins.append(best.logprob - second.logprob)


def parted(found: list[Generated], reference: list[Generated], tolerance: float) -> int:
    """How many part from their reference, all of them where its two best tokens are closer than twice `tolerance`.

    Fails for any that parts elsewhere, and for a probability of a prompt's token, or of one before that place, whose
    logarithm differs by more.
    """
    count = 0
    for i, (one, other) in enumerate(zip(found, reference, strict=True)):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        end = next((place for place, (a, b) in pairs if a != b), None)
        differences = [abs(a - b) for a, b in zip(one.prompt, other.prompt, strict=True)]
        differences += [abs(a - b) for a, b in zip(one.own[:end], other.own[:end], strict=True)]
        assert max(differences, default=0) < tolerance, f"request {i}: probabilities differ by {max(differences):.3f}"
        if end is not None:
            assert other.margins[end] < 2 * tolerance, f"request {i} parts at {end}, margin {other.margins[end]:.3f}"
            count += 1
    return count


def error(found: list[Generated], exact: list[Generated]) -> float:
    """By how much the logarithms of the prompts' probabilities are off, on average."""
    pairs = [
        pair for one, other in zip(found, exact, strict=True) for pair in zip(one.prompt, other.prompt, strict=True)
    ]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
