"""batch_invariant: the same bits alone, in any batch, in chunks of any size, and after a preemption."""

import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tp.conftest import LIMIT, VOCAB
from tests.tp.test_tp_guided import Bench
from tllm_core.engines.tp.attention import AttentionMetadata, AttentionShape
from tllm_core.engines.tp.attention.invariant import InvariantAttention
from tllm_core.engines.tp.attention.torch import TorchAttention
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.invariant import ROWS, in_blocks, whole_threads
from tllm_core.engines.tp.linear import Linear
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError

BLOCK = 16


class Forward:
    """Runs prompts through one runner, a chunk of each per step, in blocks of the cache that nothing else uses."""

    def __init__(self, model_dir: Path, dtype: str, threads: int, **settings) -> None:
        options = {"model": str(model_dir), "dtype": dtype, "threads": threads, "num_blocks": 128, "block_size": BLOCK}
        self.runner = Runner(TpSettings(**options | {"batch_invariant": True} | settings))
        self.runner.load(lambda name, done: None)

    def logits(self, prompts: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
        """Of each prompt the logits of all its tokens, [tokens, vocab]; prompt i in pieces of chunks[i]."""
        free = iter(random.Random(len(prompts)).sample(range(128), 128))
        tables = [[next(free) for _ in range(-(-len(prompt) // BLOCK))] for prompt in prompts]
        done, found = [0] * len(prompts), [list[torch.Tensor]() for _ in prompts]
        while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
            turn = [i for i in range(len(prompts)) if done[i] < len(prompts[i])]
            turn.sort(key=lambda i: min(chunks[i], len(prompts[i]) - done[i]) > 1)  # those of one token first
            self._step(prompts, chunks, tables, done, found, turn)
        return [torch.cat(rows) for rows in found]

    def _step(self, prompts, chunks, tables, done, found, turn: list[int]) -> None:
        lengths = [min(chunks[i], len(prompts[i]) - done[i]) for i in turn]
        tokens = array("i", [t for i, n in zip(turn, lengths, strict=True) for t in prompts[i][done[i] : done[i] + n]])
        batch = ScheduledBatch(
            token_ids=tokens,
            query_lens=lengths,
            context_lens=[done[i] for i in turn],
            block_tables=[tables[i] for i in turn],
            logits_rows=list(range(len(tokens))),
            num_decodes=lengths.count(1),
        )
        logits = self.runner.execute(batch)
        assert logits is not None
        for i, rows in zip(turn, logits.split(lengths), strict=True):
            found[i].append(rows.clone())
            done[i] += len(rows)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def forward(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Forward]:
    threads = torch.get_num_threads()
    forward = Forward(model_dir, request.param, threads=2)
    yield forward
    forward.runner.close()
    torch.set_num_threads(threads)


def some_prompts(*lengths: int) -> list[list[int]]:
    pick = random.Random(7)
    return [[pick.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_prompts_logits_have_the_same_bits_in_every_batch_and_chunk(forward: Forward) -> None:
    prompts = some_prompts(1, 3, 17, 64, 65, 130, 200)
    alone = [forward.logits([prompt], [len(prompt)])[0] for prompt in prompts]
    assert not torch.isnan(torch.cat(alone)).any()
    ways = [[LIMIT] * 7, [64] * 7, [1, 2, 5, 64, 1, 13, 100]]
    for chunks in ways:
        together = forward.logits(prompts, chunks)
        for mine, theirs in zip(alone, together, strict=True):
            assert same_bits(mine, theirs)
    for order in ([6, 1], [5, 4, 6], [2, 3, 0, 1, 4]):
        together = forward.logits([prompts[i] for i in order], [1 + 9 * i for i in order])
        for i, theirs in zip(order, together, strict=True):
            assert same_bits(alone[i], theirs)


class Attend:
    """One sequence through one attention backend with two layers, the second with a window."""

    def __init__(self, kind: type[TorchAttention], length: int, dtype: torch.dtype) -> None:
        shape = AttentionShape(
            num_layers=2,
            num_blocks=64,
            block_size=BLOCK,
            num_heads=6,
            num_kv_heads=2,
            head_dim=16,
            dtype=dtype,
            device=torch.device("cpu"),
            scale=0.3,
            windows=(None, 100),
        )
        self.attention = kind(shape)
        generator = torch.Generator().manual_seed(3)
        self.q, self.kv = (torch.randn(length, heads, 16, generator=generator).to(dtype) for heads in (6, 2 * 2))
        self.table = random.Random(1).sample(range(64), -(-length // BLOCK))

    def run(self, chunks: list[int]) -> torch.Tensor:
        """[2 layers, tokens, heads * head_dim], the sequence in pieces of `chunks` tokens."""
        found, start = [], 0
        for count in chunks:
            batch = ScheduledBatch(
                token_ids=array("i", [0] * count),
                query_lens=[count],
                context_lens=[start],
                block_tables=[self.table],
                logits_rows=[],
                num_decodes=int(count == 1),
            )
            self.attention.plan(AttentionMetadata.of(batch, BLOCK))
            own = slice(start, start + count)
            layers = []
            for layer in range(2):
                self.attention.write_kv(layer, self.kv[own])
                layers.append(self.attention.run(layer, self.q[own]).clone())
            found.append(torch.stack(layers))
            start += count
        return torch.cat(found, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_attention_over_many_blocks_and_windows_has_the_same_bits_however_it_is_cut(dtype: torch.dtype) -> None:
    whole = Attend(InvariantAttention, 600, dtype).run([600])
    assert torch.equal(Attend(InvariantAttention, 600, dtype).run([1, 99, 257, 200, *[1] * 43]), whole)
    usual = Attend(TorchAttention, 600, dtype).run([600])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, usual, atol=tolerance, rtol=tolerance)


def test_it_computes_what_the_usual_kernels_do(model_dir: Path, forward: Forward) -> None:
    if forward.runner.settings.dtype != "float32":
        return
    prompts = some_prompts(20, 150)
    usual = Forward(model_dir, "float32", 2, batch_invariant=False).logits(prompts, [30, 64])
    for mine, theirs in zip(forward.logits(prompts, [30, 64]), usual, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_without_it_bits_do_differ_or_this_test_could_not_fail(model_dir: Path) -> None:
    usual = Forward(model_dir, "float32", 2, batch_invariant=False)
    prompts = some_prompts(64, 65, 130, 200, 250)
    alone = [usual.logits([prompt], [len(prompt)])[0] for prompt in prompts]
    together = usual.logits(prompts, [7] * 5)
    assert not all(same_bits(mine, theirs) for mine, theirs in zip(alone, together, strict=True))


def test_the_engines_logprobs_are_the_same_to_the_bit_after_preemptions(text_model_dir: Path) -> None:
    prompts = some_prompts(20, 33, 5, 48, 70, 11)
    fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    alone, crowded = (
        [],
        Bench(text_model_dir, batch_invariant=True, num_blocks=12, max_batched_tokens=24, max_num_seqs=8),
    )
    for prompt in prompts:
        request_id = crowded.submit(prompt, **fields)
        crowded.run()
        alone.append(told(crowded, request_id))
    assert crowded.engine.stats().preemptions == 0
    request_ids = [crowded.submit(prompt, **fields) for prompt in prompts]
    crowded.run()
    assert crowded.engine.stats().preemptions > 0
    assert [told(crowded, request_id) for request_id in request_ids] == alone
    crowded.check_empty()


def told(bench: Bench, request_id: int) -> list:
    outputs = bench.outputs[request_id]
    return [[o.token_ids, o.logprobs, o.prompt_logprobs] for o in outputs]


def test_blocks_are_whole_and_rows_come_back_in_their_places() -> None:
    seen = []

    def double(block: torch.Tensor) -> torch.Tensor:
        seen.append(block.shape)
        assert block.is_contiguous()
        return block * 2

    for rows in (1, ROWS, ROWS + 1, 3 * ROWS):
        x = torch.randn(rows, 2, 4)
        assert torch.equal(in_blocks(double, x), x * 2)
    assert set(seen) == {(ROWS, 2, 4)}
    assert [whole_threads(count) for count in (1, 2, 3, 4, 7, 64)] == [1, 2, 2, 4, 4, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536)])
def test_products_of_a_real_models_sizes_have_the_same_bits_in_every_place(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    linear = Linear(torch.randn(shape, generator=generator).mul_(0.05).to(dtype), None)
    linear.in_blocks = True
    x = torch.randn(100, shape[1], generator=generator).to(dtype)
    with torch.inference_mode():
        whole = linear(x)
        for first, rows in ((0, 1), (5, 1), (63, 2), (17, 40), (99, 1)):
            assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows])


def test_a_block_size_that_does_not_divide_a_block_of_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="divides 256, not 24"):
        TpSettings(batch_invariant=True, block_size=24)
