"""FlashInfer's backend on a stand-in that checks every call: attention by its definition, whole engines token by token."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tp.flashinfer_layer import HEAD_DIM, run_once, shape_of
from tests.tp.flashinfer_runs import bfloat16_everywhere, engine_on, error, generate, parted, prompts, save_model
from tests.tp.flashinfer_stand_in import VERSIONS, FlashInferStandIn, Tape
from tests.tp.reference import VOCAB, reference
from tests.tp.test_tp_attention import batches
from tllm_core.engines.tp.attention import AttentionMetadata
from tllm_core.engines.tp.attention.flashinfer import FlashInferAttention
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.kernels import FlashInferKernels, choose
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError, ControlError

ROUNDING = 0.25
"""Of log-probabilities, where bfloat16 is rounded in another order: logits of about 8 are a sixteenth apart."""
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(params=VERSIONS)
def stand_in(request: pytest.FixtureRequest) -> FlashInferStandIn:
    return FlashInferStandIn(request.param)


def test_a_copied_block_holds_what_its_source_held_before_any_copy(stand_in: FlashInferStandIn) -> None:
    attention = FlashInferAttention(stand_in, shape_of(4, 16, num_layers=2), kv_dtype=torch.float8_e4m3fn)
    for block in range(5):
        attention.cache[:, :, block].fill_(block + 1)
    attention.copy([0, 1], [1, 3])
    assert attention.cache[:, :, :, 0, 0, 0].float().unique(dim=0).tolist() == [[[1, 1, 3, 2, 5]] * 2]


@settings(max_examples=20, deadline=None)
@given(case=batches(), window=st.sampled_from([None, 1, 7]), invariant=st.booleans(), version=st.sampled_from(VERSIONS))
def test_attention_is_what_its_definition_says(
    case: tuple[ScheduledBatch, int], window: int | None, invariant: bool, version: str
) -> None:
    torch.manual_seed(0)
    batch, block_size = case
    blocks = max(block for table in batch.block_tables for block in table) + 1
    shape = shape_of(blocks, block_size, windows=(window,), scale=0.2)
    attention = FlashInferAttention(FlashInferStandIn(version), shape, batch_invariant=invariant)
    found, expected = run_once(attention, shape, batch, window)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@given(batches())
def test_unrolled_every_token_sees_what_it_saw_in_its_sequence(case: tuple[ScheduledBatch, int]) -> None:
    batch, block_size = case
    metadata = AttentionMetadata.of(batch, block_size)
    rows = metadata.unrolled()
    indptr, pages = rows.kv_indptr.tolist(), rows.kv_indices.tolist()
    for token, (i, position) in enumerate(
        zip(metadata.batch_indices.tolist(), metadata.positions.tolist(), strict=True)
    ):
        assert pages[indptr[token] : indptr[token + 1]] == batch.block_tables[i][: position // block_size + 1]
        assert rows.last_page_len[token] == position % block_size + 1
        assert rows.seq_lens[token] == position + 1
    assert (rows.num_decodes, rows.num_sequences) == (metadata.num_tokens, metadata.num_tokens)
    assert torch.equal(rows.slot_mapping, metadata.slot_mapping)


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(0, 4))
def test_padded_a_batch_keeps_its_sequences_and_the_others_are_tokens_in_the_spare_page(
    contexts: list[int], extra: int
) -> None:
    tables = [list(range(i * 20, i * 20 + context // 4 + 1)) for i, context in enumerate(contexts)]
    rows = len(contexts)
    batch = ScheduledBatch(
        token_ids=array("i", [0] * rows),
        query_lens=[1] * rows,
        context_lens=contexts,
        block_tables=tables,
        logits_rows=[],
    )
    metadata = AttentionMetadata.of(batch, 4)
    padded = metadata.padded(rows + extra, page=999)
    assert padded.kv_indices.tolist() == metadata.kv_indices.tolist() + [999] * extra
    assert padded.kv_indptr.diff().tolist() == [len(table) for table in tables] + [1] * extra
    assert padded.last_page_len.tolist() == metadata.last_page_len.tolist() + [1] * extra
    assert padded.positions.tolist() == contexts + [0] * extra
    assert padded.seq_lens.tolist() == [context + 1 for context in contexts] + [1] * extra
    assert padded.slot_mapping.tolist()[rows:] == [999 * 4] * extra
    assert padded.num_decodes == padded.num_sequences == rows + extra


def test_a_prompt_can_not_be_padded_into_a_graph() -> None:
    batch = ScheduledBatch(
        token_ids=array("i", [1, 2]), query_lens=[2], context_lens=[0], block_tables=[[0]], logits_rows=[]
    )
    with pytest.raises(ValueError, match="are no part of"):
        AttentionMetadata.of(batch, 4).padded(4, page=9)


def test_a_float8_cache_holds_keys_and_values_divided_by_their_scales(stand_in: FlashInferStandIn) -> None:
    torch.manual_seed(0)
    shape = shape_of(8, 16)
    batch = ScheduledBatch(
        token_ids=array("i", range(21)),
        query_lens=[1, 20],
        context_lens=[0, 0],
        block_tables=[[3], [1, 5]],
        logits_rows=[],
    )
    plain, expected = run_once(FlashInferAttention(stand_in, shape), shape, batch)
    torch.manual_seed(0)
    narrow = FlashInferAttention(stand_in, shape, kv_dtype=torch.float8_e4m3fn, kv_scales=(0.5, 0.25))
    found, _ = run_once(narrow, shape, batch)
    assert narrow.cache.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found, expected, atol=0.15, rtol=0.1)
    assert (found - expected).abs().max() > (plain - expected).abs().max()
    before = narrow.cache.float()
    narrow.copy([0, 1, 3], [1, 2, 3])
    assert torch.equal(narrow.cache.float()[:, :, :5], before[:, :, [0, 0, 1, 3, 4]]), "all were read first"
    narrow.clear([1, 2, 3, 5])
    assert not narrow.cache.float().any()


def test_values_that_float8_can_not_hold_are_its_largest_and_never_nan(stand_in: FlashInferStandIn) -> None:
    shape = shape_of(2, 16)
    attention = FlashInferAttention(stand_in, shape, kv_dtype=torch.float8_e4m3fn)
    batch = ScheduledBatch(
        token_ids=array("i", [1]), query_lens=[1], context_lens=[0], block_tables=[[0]], logits_rows=[]
    )
    attention.plan(AttentionMetadata.of(batch, 16))
    attention.write_kv(0, torch.full((1, 2 * 2, HEAD_DIM), 1e5).bfloat16())
    assert attention.cache[0, :, 0, 0].float().unique().tolist() == [448]


# ------------------------------------------------------------------------------------------------ whole engines


@pytest.fixture(scope="module", params=[(4, 2), (6, 2), (8, 2)], ids=["group2", "group3", "group4"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), *request.param)


@pytest.fixture(scope="module")
def narrow_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("narrow"))


BATCHING = {"max_batched_tokens": 32, "max_num_seqs": 6}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_an_engine_generates_what_it_does_on_torch(model_dir: Path, stand_in: FlashInferStandIn, graphs: bool) -> None:
    requests = prompts(8)
    with engine_on(model_dir, None, **BATCHING) as engine:
        reference = generate(engine, requests)
    with engine_on(model_dir, None, dtype="float32", **BATCHING) as engine:
        exact = generate(engine, requests)
    tape = Tape() if graphs else None
    with engine_on(model_dir, stand_in, tape, **BATCHING) as engine:
        found = generate(engine, requests)
        steps = engine.stats().steps
    assert parted(found, reference, ROUNDING) <= len(requests) // 2
    assert error(found, exact) < 1.1 * error(reference, exact)
    assert stand_in.calls["append_paged_kv_cache"] > 0
    assert stand_in.calls["fused_add_rmsnorm"] > 0
    if tape is not None:
        assert tape.recorded == 4  # batches of 1, 2, 4 and 6
        assert 0 < tape.replayed < steps


FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"head_dim": 64, "sliding_window": 8},
    "Qwen2": {"hidden_size": 256},
    "Qwen3": {"head_dim": 64},
    "Gemma3": {
        "head_dim": 64,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 48,
    },
    "Phi3": {"hidden_size": 256, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_near_to_float32_as_on_torch(
    family: str, stand_in: FlashInferStandIn, tmp_path: Path
) -> None:
    """Windows, scales, norms of heads, norms that add one, partial rotations, and what is laid out between heads."""
    reference(family, FAMILIES[family]).save_pretrained(tmp_path)
    requests, found = prompts(5, seed=4, longest=40, vocab=VOCAB), []
    for dtype, fi in (("float32", None), ("bfloat16", None), ("bfloat16", stand_in)):
        tape = None if fi is None else Tape()
        with engine_on(tmp_path, fi, tape, dtype=dtype, max_batched_tokens=16, max_num_seqs=4) as engine:
            found.append(generate(engine, requests, new_tokens=6))
    exact, torch_s, ours = found
    assert error(ours, exact) < 1.25 * error(torch_s, exact)
    parted(ours, torch_s, ROUNDING)


def test_graphs_change_no_token(narrow_dir: Path, stand_in: FlashInferStandIn) -> None:
    requests, found = prompts(10, seed=1, longest=20), []
    for tape in (None, Tape()):
        with engine_on(narrow_dir, stand_in, tape, max_num_seqs=7) as engine:
            found.append([g.token_ids for g in generate(engine, requests)])
    assert found[0] == found[1]


def test_graphs_are_recorded_anew_for_new_weights_and_after_sleep(narrow_dir: Path, tmp_path: Path) -> None:
    other, tape, requests = save_model(tmp_path, seed=1), Tape(), prompts(3, seed=2, longest=10)
    with engine_on(narrow_dir, FlashInferStandIn(VERSIONS[-1]), tape, max_num_seqs=3) as engine:
        first = generate(engine, requests)
        sizes = tape.recorded
        engine.control("sleep", [1], None)
        engine.control("wakeup", [], None)
        assert tape.recorded == 2 * sizes
        awake = generate(engine, requests)
        engine.control("update_weights", [str(other)], None)
        assert tape.recorded == 3 * sizes
        updated = generate(engine, requests)
    with engine_on(other, FlashInferStandIn(VERSIONS[-1]), max_num_seqs=3) as engine:
        fresh = generate(engine, requests)
    assert awake == first
    assert [g.token_ids for g in updated] == [g.token_ids for g in fresh]
    assert updated != first


def test_where_no_room_is_left_to_record_steps_the_engine_stays_as_it_was(
    narrow_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, requests = save_model(tmp_path, seed=1), prompts(3, seed=2, longest=10)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    with engine_on(narrow_dir, FlashInferStandIn(VERSIONS[-1]), Tape(), max_num_seqs=3) as engine:
        first = [g.token_ids for g in generate(engine, requests)]
        with monkeypatch.context() as patch:
            patch.setattr(FlashInferKernels, "prepare", fail)
            with pytest.raises(ControlError, match="no room to prepare steps of 3 sequences"):
                engine.control("update_weights", [str(other)], None)
            assert [g.token_ids for g in generate(engine, requests)] == first
            engine.control("sleep", [1], None)
            for _ in range(2):
                with pytest.raises(ControlError, match="no room to prepare steps of 3 sequences"):
                    engine.control("wakeup", [], None)
        engine.control("wakeup", [], None)
        assert [g.token_ids for g in generate(engine, requests)] == first


def test_batch_invariant_every_request_gets_the_tokens_that_it_gets_alone(
    narrow_dir: Path, stand_in: FlashInferStandIn
) -> None:
    requests = prompts(4, seed=3)
    with engine_on(narrow_dir, stand_in, batch_invariant=True, **BATCHING) as engine:
        together = generate(engine, requests)
        alone = [generate(engine, [prompt])[0] for prompt in requests]
    assert parted(together, alone, ROUNDING) <= len(requests) // 2


def test_every_tensor_is_where_its_kernel_wants_it(narrow_dir: Path, stand_in: FlashInferStandIn) -> None:
    """On torch's meta device nothing is computed, and the CPU is another place than the device."""
    with bfloat16_everywhere(), pytest.MonkeyPatch.context() as patch:
        settings = TpSettings(model=str(narrow_dir), dtype="bfloat16", device="cpu", num_blocks=8, cuda_graphs=False)
        patch.setattr("tllm_core.engines.tp.runner.choose", lambda settings, *_: FlashInferKernels(stand_in, settings))
        runner = Runner(settings)
        runner.device = META
        runner.load(lambda name, done: None)
        logits = runner.execute(
            ScheduledBatch(
                token_ids=array("i", range(21)),
                query_lens=[1, 20],
                context_lens=[0, 0],
                block_tables=[[3], [1, 5]],
                logits_rows=[0, 20],
            )
        )
    assert (logits.device, logits.shape) == (META, (2, 320))


# ------------------------------------------------------------------------------------------------ the choice


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def kernels_for(
    stand_in: object, patch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, **settings: object
) -> str:
    patch.setitem(__import__("sys").modules, "flashinfer", stand_in)
    return choose(TpSettings(**settings), torch.device("cuda"), dtype, head_dim).name  # type: ignore[arg-type]


def test_on_a_gpu_flashinfer_is_chosen_where_it_can_be(stand_in: FlashInferStandIn, a_gpu: pytest.MonkeyPatch) -> None:
    assert kernels_for(stand_in, a_gpu, torch.bfloat16, 64, cuda_graphs=False) == "flashinfer"
    assert kernels_for(stand_in, a_gpu, torch.bfloat16, 64, attention="torch") == "torch"
    assert kernels_for(stand_in, a_gpu, torch.bfloat16, 96) == "torch"
    assert kernels_for(stand_in, a_gpu, torch.float32, 64) == "torch"


@pytest.mark.parametrize(
    ("version", "dtype", "head_dim", "capability", "message"),
    [
        ("0.7.4", torch.float32, 64, (9, 0), "computes in bfloat16 and float16, and dtype is float32"),
        ("0.7.4", torch.bfloat16, 96, (9, 0), r"heads of \(64, 128, 256\), and the model's have 96"),
        ("0.7.4", torch.bfloat16, 64, (7, 5), r"bfloat16 needs compute capability \(8, 0\), and the GPU has \(7, 5\)"),
        ("0.6.12", torch.bfloat16, 64, (9, 0), "is version 0.6.12, and 0.6.13 to below 0.8 is supported"),
        ("0.8.0", torch.bfloat16, 64, (9, 0), "is version 0.8.0"),
        (None, torch.bfloat16, 64, (9, 0), r"can't be imported .*pip install 'tllm-core\[flashinfer\]'"),
    ],
)
def test_flashinfer_asked_for_where_it_can_not_be_says_why(
    version: str | None,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = None if version is None else FlashInferStandIn(VERSIONS[0])
    if stand_in is not None and version is not None:
        stand_in.__version__ = version
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=message):
        kernels_for(stand_in, monkeypatch, dtype, head_dim, attention="flashinfer")


def test_on_a_cpu_flashinfer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="needs a GPU, and the device is 'cpu'"):
        choose(TpSettings(attention="flashinfer"), CPU, torch.bfloat16, 64)
    assert choose(TpSettings(), CPU, torch.bfloat16, 64).name == "torch"


def test_a_float8_cache_without_flashinfer_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_dtype 'float8_e4m3fn' needs attention 'flashinfer'"):
        choose(TpSettings(kv_dtype="float8_e4m3fn"), CPU, torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="'fa3' reads a kv_dtype of float8_e5m2 with float8 queries only"):
        TpSettings(kv_dtype="float8_e5m2", attention_kernels="fa3")
    with pytest.raises(ConfigError, match="k_scale must be above 0"):
        TpSettings(k_scale=0.0)
