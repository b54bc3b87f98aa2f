"""The engine on a GPU, with the real FlashInfer: the same promises as on the stand-in, and what only a GPU can break.

Each test is run where there is a CUDA device and FlashInfer, and skipped with the reason elsewhere.
"""

import os
import signal
import socket
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tp.flashinfer_layer import HEAD_DIM, run_once, shape_of
from tests.tp.flashinfer_runs import Alone, error, generate, parted, prompts, save_model
from tests.tp.reference import VOCAB, reference
from tests.tp.test_tp_attention import batches
from tests.tp.test_tp_comm import Context, each
from tests.tp.test_tp_flashinfer import FAMILIES, ROUNDING
from tllm_core import EngineDeadError, GenerationExecutor, SamplingParams
from tllm_core.engines.tp.attention import AttentionMetadata
from tllm_core.engines.tp.attention.flashinfer import FlashInferAttention
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.comm.agree import least
from tllm_core.engines.tp.comm.connect import connect
from tllm_core.engines.tp.comm.nccl import NcclGroup
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.ops.flashinfer import FlashInferOps
from tllm_core.engines.tp.ops.torch import TorchOps
from tllm_core.engines.tp.rope import rope_table
from tllm_core.engines.tp.spec import TpSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),  # kernels are compiled when they are first used
    pytest.mark.filterwarnings("default"),  # those of other packages
]
GPU = torch.device("cuda")
BATCHING = {"max_batched_tokens": 32, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def flashinfer() -> Any:
    return pytest.importorskip("flashinfer")


@pytest.fixture(scope="module", params=[(4, 2), (6, 2), (8, 2)], ids=["group2", "group3", "group4"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), *request.param)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("small"))


@contextmanager
def engine_on_gpu(directory: Path, attention: str, **options: Any) -> Iterator[TpEngine]:
    own = {"model": str(directory), "dtype": "bfloat16", "device": "cuda", "num_blocks": 64, "attention": attention}
    engine = TpEngine(TpSettings(**(own | options)))
    engine.start(Alone())
    try:
        yield engine
    finally:
        engine.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=batches(), window=st.sampled_from([None, 1, 7]), invariant=st.booleans(), heads=st.sampled_from([4, 6, 8]))
def test_attention_is_what_its_definition_says(
    case: tuple[ScheduledBatch, int], window: int | None, invariant: bool, heads: int, flashinfer: Any
) -> None:
    torch.manual_seed(0)
    batch, block_size = case
    blocks = max(block for table in batch.block_tables for block in table) + 1
    shape = shape_of(blocks, block_size, windows=(window,), scale=0.2, device=GPU, num_heads=heads)
    attention = FlashInferAttention(flashinfer, shape, batch_invariant=invariant)
    found, expected = run_once(attention, shape, batch, window)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_kernels_compute_what_torch_does(dtype: torch.dtype, flashinfer: Any) -> None:
    torch.manual_seed(0)
    ours, theirs = FlashInferOps(flashinfer), TorchOps()
    x, residual = torch.randn(2, 33, 256, device=GPU, dtype=dtype)
    weight = torch.randn(256, device=GPU, dtype=dtype)
    near = {"atol": 2e-2, "rtol": 2e-2}
    for offset in (0.0, 1.0):
        one, other = (ops.norm(weight, 1e-5, offset=offset) for ops in (ours, theirs))
        torch.testing.assert_close(one(x), other(x), **near)
        expected = other.add(x.clone(), residual.clone())
        for a, b in zip(one.add(x.clone(), residual.clone()), expected, strict=True):
            torch.testing.assert_close(a, b, **near)
    of_heads = torch.randn(33, 7, HEAD_DIM, device=GPU, dtype=dtype)
    head_weight = weight[:HEAD_DIM]
    found, expected_norm = (ops.norm(head_weight, 1e-5)(of_heads[:, :4]) for ops in (ours, theirs))
    torch.testing.assert_close(found, expected_norm, **near)
    torch.testing.assert_close(ours.silu_and_mul(x), theirs.silu_and_mul(x), **near)
    torch.testing.assert_close(ours.gelu_tanh_and_mul(x), theirs.gelu_tanh_and_mul(x), **near)
    for parameters in ({"rope_theta": 10000.0}, {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}):
        table = rope_table(parameters, HEAD_DIM, 100).to(GPU)
        positions = torch.randint(100, (33,), dtype=torch.int32, device=GPU)
        expected_heads, rotated = of_heads.clone()[:, :5], of_heads.clone()[:, :5]
        theirs.rotate(expected_heads, theirs.rotation(table, positions, dtype))
        ours.rotate(rotated, ours.rotation(table, positions, dtype))
        torch.testing.assert_close(rotated, expected_heads, **near)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("kernels", ["auto", "fa2"])
def test_an_engine_generates_what_it_does_on_torch(
    model_dir: Path, flashinfer: Any, graphs: bool, kernels: str
) -> None:
    requests = prompts(12)
    with engine_on_gpu(model_dir, "torch", **BATCHING) as engine:
        torch_s = generate(engine, requests)
    with engine_on_gpu(model_dir, "torch", dtype="float32", **BATCHING) as engine:
        exact = generate(engine, requests)
    own = {"attention_kernels": kernels, "cuda_graphs": graphs, **BATCHING}
    with engine_on_gpu(model_dir, "flashinfer", **own) as engine:
        found = generate(engine, requests)
        again = generate(engine, requests)
    assert parted(found, torch_s, ROUNDING) <= len(requests) // 2
    assert error(found, exact) < 1.25 * error(torch_s, exact)
    assert parted(again, found, ROUNDING) <= len(requests) // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_near_to_float32_as_on_torch(family: str, flashinfer: Any, tmp_path: Path) -> None:
    reference(family, FAMILIES[family]).save_pretrained(tmp_path)
    requests, found = prompts(6, seed=4, longest=40, vocab=VOCAB), []
    for dtype, attention in (("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "flashinfer")):
        with engine_on_gpu(tmp_path, attention, dtype=dtype, max_batched_tokens=16, max_num_seqs=4) as engine:
            found.append(generate(engine, requests))
    exact, torch_s, ours = found
    assert error(ours, exact) < 1.25 * error(torch_s, exact)
    parted(ours, torch_s, ROUNDING)


def test_a_float8_cache_stays_within_its_precision(small_dir: Path, flashinfer: Any) -> None:
    requests, found = prompts(6, seed=5), []
    for kv_dtype in ("auto", "float8_e4m3fn"):
        with engine_on_gpu(small_dir, "flashinfer", kv_dtype=kv_dtype, **BATCHING) as engine:
            found.append(generate(engine, requests))
    assert 0 < error(found[1], found[0]) < 0.3


def test_graphs_are_recorded_anew_after_sleep_and_for_new_weights(
    small_dir: Path, flashinfer: Any, tmp_path: Path
) -> None:
    other, requests = save_model(tmp_path, seed=1), prompts(4, seed=2, longest=10)
    with engine_on_gpu(small_dir, "flashinfer", max_num_seqs=4) as engine:
        first = generate(engine, requests)
        engine.control("sleep", [1], None)
        engine.control("wakeup", [], None)
        awake = generate(engine, requests)
        engine.control("update_weights", [str(other)], None)
        updated = generate(engine, requests)
    with engine_on_gpu(other, "flashinfer", max_num_seqs=4) as engine:
        fresh = generate(engine, requests)
    assert parted(awake, first, ROUNDING) <= 1
    assert parted(updated, fresh, ROUNDING) <= 1
    assert error(updated, first) > 1


def test_batch_invariant_attention_has_the_same_bits_alone_and_together(flashinfer: Any) -> None:
    """A sequence of 70 tokens: in one piece, in chunks, and beside others that decode."""
    torch.manual_seed(0)
    shape = shape_of(32, 16, device=GPU, num_heads=6)
    kv = torch.randn(70, 2 * 2, HEAD_DIM, device=GPU, dtype=torch.bfloat16)
    q = torch.randn(70, 6, HEAD_DIM, device=GPU, dtype=torch.bfloat16)

    def run(chunks: list[int], others: int) -> torch.Tensor:
        attention, table, at, found = (
            FlashInferAttention(flashinfer, shape, batch_invariant=True),
            [3, 9, 1, 7, 5],
            0,
            [],
        )
        for size in chunks:
            batch = ScheduledBatch(
                token_ids=array("i", range(others + size)),
                query_lens=[1] * others + [size],
                context_lens=[0] * others + [at],
                block_tables=[*([20 + i] for i in range(others)), table[: -(-(at + size) // 16)]],
                logits_rows=[],
            )
            attention.plan(AttentionMetadata.of(batch, 16))
            mine = slice(at, at + size)
            attention.write_kv(0, torch.cat((kv[:others], kv[mine])))
            found.append(attention.run(0, torch.cat((q[:others], q[mine])))[others:])
            at += size
        return torch.cat(found)

    whole = run([70], others=0)
    for chunks, others in (([70], 7), ([1, 16, 33, 20], 0), ([35, 35], 3)):
        assert torch.equal(run(chunks, others), whole)


# ------------------------------------------------------------------------------------------------- several ranks

GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(
    GPUS < 2, reason=f"needs two CUDA devices, and torch finds {GPUS}: ranks over NCCL stay unchecked here"
)


@contextmanager
def world(directory: Path, ranks: int, **options: Any) -> Iterator[GenerationExecutor]:
    own = {"model": str(directory), "dtype": "bfloat16", "device": "cuda", "num_blocks": 64}
    with GenerationExecutor.create(
        engine="tp", engine_options={**own, "tensor_parallel_size": ranks, **options}
    ) as executor:
        yield executor


@two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_sum_gather_and_speak_over_nccl(dtype: torch.dtype) -> None:
    devices = [torch.device("cuda", rank) for rank in range(2)]
    settings = TpSettings(tensor_parallel_size=2, device="cuda")
    with closing(socket.create_server(("127.0.0.1", 0))) as store:
        groups = each(2, lambda rank: connect(Context(rank, 2, store), settings, devices[rank]))
    assert [type(group) for group in groups] == [NcclGroup, NcclGroup]
    parts = [(torch.arange(3 * 5000).view(3, 5000) % 7 + rank).to(dtype) for rank in range(2)]

    def work(rank: int) -> list[torch.Tensor | None]:
        group, mine = groups[rank], parts[rank].to(devices[rank])
        found = [
            group.gather(mine),
            group.all_reduce(mine.clone()),
            group.all_reduce(mine.t()),
            group.gather(parts[rank]),
        ]
        assert group.broadcast(None if rank else array("i", [7, 8])) == array("i", [7, 8])
        assert least(group, 5 - rank) == 4
        return [None if x is None else x.cpu() for x in found]

    for _ in range(3):
        first, other = each(2, work)
        total, beside = parts[0] + parts[1], torch.cat(parts, dim=1)
        for x, expected in zip(first, (beside, total, total.t(), beside), strict=True):
            assert x is not None
            assert torch.equal(x, expected)
        for x, expected in zip(other, (None, total, total.t(), None), strict=True):
            assert x is expected is None or torch.equal(x, expected)
    for group in groups:
        group.close()
        group.close()


@two_gpus
@pytest.mark.parametrize(
    ("attention", "graphs"),
    [("torch", False), ("flashinfer", False), ("flashinfer", True)],
    ids=["torch", "eager", "graphs"],
)
def test_two_ranks_generate_what_one_does(small_dir: Path, attention: str, graphs: bool) -> None:
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    requests, sampling = prompts(6, seed=6), SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for ranks in (1, 2):
        with world(small_dir, ranks, attention=attention, cuda_graphs=graphs) as executor:
            assert len(executor.health().ranks) == ranks
            results = executor.generate(requests, sampling)
            assert isinstance(results, list)
            found.append([list(result.outputs[0].token_ids) for result in results])
            executor.control("sleep", 1)
            executor.control("wakeup")
            again = executor.generate(requests, sampling)
            assert isinstance(again, list)
            found.append([list(result.outputs[0].token_ids) for result in again])
    one, *others = found
    for other in others:
        # Sums over ranks round otherwise, so that a few may part at near ties; most are equal to their ends.
        assert sum(a == b for a, b in zip(one, other, strict=True)) >= len(requests) // 2
        assert all(a[:2] == b[:2] for a, b in zip(one, other, strict=True))


@two_gpus
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_though_the_other_waits_in_nccl(small_dir: Path, rank: int) -> None:
    with world(small_dir, 2, attention="torch", max_num_seqs=1) as executor:
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        results = [executor.generate_async(prompt, long) for prompt in prompts(20, longest=10)]
        next(results[0])
        os.kill(executor.health().ranks[rank].pid, signal.SIGKILL)
        for result in results:
            with pytest.raises(EngineDeadError, match=f"engine rank {rank} was killed by SIGKILL") as caught:
                result.result(60)
            assert caught.value.root_cause.rank == rank
