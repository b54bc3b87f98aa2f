"""That the stand-in of FlashInfer refuses what the package or its kernels refuse, one wrong call at a time."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tp.flashinfer_stand_in import VERSIONS, FlashInferStandIn, Refused, Tape
from tests.tp.flashinfer_stand_in.signatures import stored

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "flashinfer_signatures.py"
HALF = torch.bfloat16


@pytest.fixture(params=VERSIONS)
def fi(request: pytest.FixtureRequest) -> FlashInferStandIn:
    return FlashInferStandIn(request.param)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace() -> torch.Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8)


class Decode:
    """Two sequences, of 5 and 16 + 2 tokens, that decode: a right call, of which each test spoils one thing."""

    def __init__(self, fi: FlashInferStandIn, **made: Any) -> None:
        self.wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), **({"backend": "fa2"} | made))
        self.plan_with: dict[str, Any] = {
            "indptr": ints(0, 1, 3),
            "indices": ints(4, 0, 2),
            "last_page_len": ints(5, 2),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "page_size": 16,
            "q_data_type": HALF,
            "kv_data_type": HALF,
        }
        self.q = torch.randn(2, 4, 64, dtype=HALF)
        self.cache = torch.randn(2, 5, 16, 2, 64, dtype=HALF)

    def plan(self, **spoiled: Any) -> None:
        self.wrapper.plan(**(self.plan_with | spoiled))

    def run(self, **spoiled: Any) -> torch.Tensor:
        given = {"q": self.q, "paged_kv_cache": (self.cache[0], self.cache[1])} | spoiled
        out: torch.Tensor = self.wrapper.run(given.pop("q"), given.pop("paged_kv_cache"), **given)
        return out


def test_a_right_call_is_computed(fi: FlashInferStandIn) -> None:
    decode = Decode(fi)
    decode.plan()
    out = decode.run()
    k, v = (torch.cat((x[0], x[2, :2])).float().repeat_interleave(2, 1) for x in decode.cache)
    scores = torch.einsum("hd,khd->hk", decode.q[1].float(), k) / 8
    torch.testing.assert_close(out[1].float(), torch.einsum("hk,khd->hd", scores.softmax(-1), v), atol=1e-2, rtol=1e-2)


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "an argument that does not exist": ({"causal_mask": True}, "unexpected keyword argument 'causal_mask'"),
    "what is not computed": ({"logits_soft_cap": 30.0}, "does not compute logits_soft_cap=30.0"),
    "int64 indices": ({"indices": torch.tensor([4, 0, 2])}, "indices is torch.int64, not int32"),
    "more starts than sequences": ({"indptr": ints(0, 1, 2, 3)}, r"indptr has the shape \(4,\), not \(3,\)"),
    "starts that do not end with the indices": ({"indptr": ints(0, 1, 2)}, "goes from 0 to 2, not from 0 to 3"),
    "a sequence without a page": ({"indptr": ints(0, 0, 3)}, "has no page"),
    "an empty last page": ({"last_page_len": ints(0, 2)}, r"last_page_len is \[0, 2\]"),
    "a last page that is too full": ({"last_page_len": ints(17, 2)}, r"last_page_len is \[17, 2\]"),
    "starts on the device": ({"indptr": ints(0, 1, 3).to("meta")}, "indptr is on meta: planning would wait"),
    "indices elsewhere": ({"indices": ints(4, 0, 2).to("meta")}, "indices is on meta, not on cpu"),
    "heads that do not divide": ({"num_qo_heads": 3}, "3 heads share 2 kv heads"),
    "five heads per kv head without tensor cores": ({"num_qo_heads": 10}, "5 heads per kv head need tensor cores"),
    "a narrow head": ({"head_dim": 32}, "no kernel for head_dim 32"),
    "float32 queries": ({"q_data_type": torch.float32, "kv_data_type": None}, "float32: neither float16 nor bfloat16"),
    "a cache of another half type": ({"kv_data_type": torch.float16}, "a cache of torch.float16"),
}


@pytest.mark.parametrize("case", PLANS, ids=lambda name: name.replace(" ", "-"))
def test_a_plan_is_refused_with(case: str, fi: FlashInferStandIn) -> None:
    spoiled, message = PLANS[case]
    with pytest.raises(Refused, match=message):
        Decode(fi).plan(**spoiled)


RUNS: dict[str, tuple[Callable[[Decode], dict[str, Any]], str]] = {
    "another number of queries": (lambda d: {"q": d.q[:1]}, "1 queries for 2 sequences"),
    "other heads": (lambda d: {"q": d.q[:, :2]}, r"q has the shape \(2, 2, 64\), not \(2, 4, 64\)"),
    "another type": (lambda d: {"q": d.q.half()}, "q is torch.float16, and torch.bfloat16 was planned"),
    "another page size": (lambda d: {"paged_kv_cache": tuple(d.cache[:, :, :8])}, r"the cache has the shape \(5, 8"),
    "fewer pages": (lambda d: {"paged_kv_cache": tuple(d.cache[:, :3])}, r"pages \[4\] of a cache of 3"),
    "one tensor": (lambda d: {"paged_kv_cache": d.cache}, "a pair of keys and values"),
    "unlike halves": (
        lambda d: {"paged_kv_cache": (d.cache[0], d.cache[1].mT.contiguous().mT)},
        "laid out differently",
    ),
    "another place": (lambda d: {"q": d.q.to("meta"), "out": d.q.to("meta")}, "q is on meta, not on cpu"),
    "scattered heads": (lambda d: {"q": d.q.mT.contiguous().mT}, "the last dimension of q is not contiguous"),
    "float32 results": (lambda d: {"out": torch.empty(2, 4, 64)}, "out has another type"),
}


@pytest.mark.parametrize("case", RUNS, ids=lambda name: name.replace(" ", "-"))
def test_a_run_is_refused_with(case: str, fi: FlashInferStandIn) -> None:
    spoil, message = RUNS[case]
    decode = Decode(fi)
    decode.plan()
    with pytest.raises(Refused, match=message):
        decode.run(**spoil(decode))


def test_nothing_runs_before_it_is_planned(fi: FlashInferStandIn) -> None:
    with pytest.raises(Refused, match="run before plan"):
        Decode(fi).run()
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    with pytest.raises(Refused, match="run before plan"):
        prefill.run(torch.zeros(1, 4, 64, dtype=HALF), tuple(torch.zeros(2, 5, 16, 2, 64, dtype=HALF)))


def test_a_prompt_must_be_planned_causal_and_end_its_sequence(fi: FlashInferStandIn) -> None:
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    plan: dict[str, Any] = {
        "qo_indptr": ints(0, 6),
        "paged_kv_indptr": ints(0, 1),
        "paged_kv_indices": ints(3),
        "paged_kv_last_page_len": ints(5),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "page_size": 16,
        "q_data_type": HALF,
    }
    with pytest.raises(Refused, match="a prompt's attention is causal"):
        prefill.plan(**plan)
    prefill.plan(**plan, causal=True)
    cache = tuple(torch.zeros(2, 5, 16, 2, 64, dtype=HALF))
    with pytest.raises(Refused, match="7 queries, and 6 were planned"):
        prefill.run(torch.zeros(7, 4, 64, dtype=HALF), cache)
    with pytest.raises(Refused, match="6 queries over 5 keys"):
        prefill.run(torch.zeros(6, 4, 64, dtype=HALF), cache)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (torch.zeros(128 << 20), "not uint8"),
        (torch.zeros(1 << 20, dtype=torch.uint8), "has only 1048576 bytes"),
        (torch.full((128 << 20,), 7, dtype=torch.uint8), "was not zeroed"),
    ],
)
def test_a_workspace_is_refused(space: torch.Tensor, message: str, fi: FlashInferStandIn) -> None:
    with pytest.raises(Refused, match=message):
        fi.BatchDecodeWithPagedKVCacheWrapper(space)


# ------------------------------------------------------------------------------------------------ graphs


def _nothing(_: object) -> None:
    """What is recorded returns nothing."""


def for_graphs(fi: FlashInferStandIn, rows: int = 2, pages: int = 6) -> Decode:
    return Decode(
        fi,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(pages, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.ones(rows, dtype=torch.int32),
    )


def test_a_wrapper_for_graphs_keeps_its_batch_size_buffers_and_shape(fi: FlashInferStandIn) -> None:
    with pytest.raises(Refused, match="2 sequences for a graph of 3"):
        for_graphs(fi, rows=3).plan()
    with pytest.raises(Refused, match="3 pages for a buffer of 2"):
        for_graphs(fi, pages=2).plan()
    with pytest.raises(Refused, match="graphs need buffers"):
        Decode(fi, use_cuda_graph=True)
    decode = for_graphs(fi)
    decode.plan()
    with pytest.raises(Refused, match="window_left changed"):
        decode.plan(window_left=7)


def test_a_replay_reads_what_was_planned_last_into_the_same_buffers(fi: FlashInferStandIn) -> None:
    decode, tape, out = for_graphs(fi), Tape(), torch.zeros(2, 4, 64, dtype=HALF)
    decode.plan()
    replay = tape.record(lambda: _nothing(decode.run(out=out)))
    first = out.clone()
    decode.plan(indices=ints(1, 3, 2), last_page_len=ints(9, 1))
    replay()
    plain = Decode(fi)
    plain.q, plain.cache = decode.q, decode.cache
    plain.plan(indices=ints(1, 3, 2), last_page_len=ints(9, 1))
    assert torch.equal(out, plain.run())
    assert not torch.equal(out, first)


def test_a_tape_repeats_what_was_done_to_memory_and_nothing_of_python() -> None:
    x, out, factor = torch.ones(3), torch.zeros(3), [2.0]
    replay = Tape().record(lambda: _nothing(out.copy_(torch.relu(x.view(3) * factor[0]))))
    x.fill_(5)
    factor[0] = 100.0
    replay()
    assert out.tolist() == [10, 10, 10]


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "a condition": lambda x: bool(x.any()),
    "a tensor of Python's": lambda x: x + torch.tensor([1.0]),
    "a result of unknown size": lambda x: x[x > 0],
}


@pytest.mark.parametrize("run", WAITS.values(), ids=WAITS)
def test_what_the_host_must_wait_for_or_make_can_not_be_recorded(run: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(3)
    with pytest.raises(Refused, match="can't be recorded"):
        Tape().record(lambda: _nothing(run(x)))


def test_planning_can_not_be_recorded(fi: FlashInferStandIn) -> None:
    decode = Decode(fi)
    with pytest.raises(Refused, match="can't be recorded"):
        Tape().record(decode.plan)


# ------------------------------------------------------------------------------------------------ functions


def test_norms_demand_one_half_type_and_the_right_size(fi: FlashInferStandIn) -> None:
    x, weight = torch.ones(3, 8, dtype=HALF), torch.ones(8, dtype=HALF)
    assert fi.rmsnorm(x, weight, eps=1e-6).dtype == HALF
    with pytest.raises(Refused, match="different types"):
        fi.rmsnorm(x, weight.float())
    with pytest.raises(Refused, match="neither float16 nor bfloat16"):
        fi.rmsnorm(x.float(), weight.float())
    with pytest.raises(Refused, match=r"weight has the shape \(4,\), not \(8,\)"):
        fi.gemma_rmsnorm(x, weight[:4])
    with pytest.raises(Refused, match="residual is on meta"):
        fi.fused_add_rmsnorm(x, x.to("meta"), weight)
    with pytest.raises(Refused, match="multiple values for argument 'eps'"):
        fi.fused_add_rmsnorm(x, x, weight, 1e-6, eps=1e-6)


def test_activations_demand_dense_aligned_rows(fi: FlashInferStandIn) -> None:
    assert fi.silu_and_mul(torch.ones(3, 16, dtype=HALF)).shape == (3, 8)
    with pytest.raises(Refused, match="not contiguous"):
        fi.silu_and_mul(torch.ones(3, 32, dtype=HALF)[:, :16])
    with pytest.raises(Refused, match="no multiple of 16 bytes"):
        fi.gelu_tanh_and_mul(torch.ones(3, 12, dtype=HALF))


def test_rotations_demand_a_float32_table_that_has_all_positions(fi: FlashInferStandIn) -> None:
    heads, table = torch.ones(2, 4, 64, dtype=HALF), torch.ones(10, 64)
    given: dict[str, Any] = {
        "positions": ints(0, 9),
        "query": heads[:, :3].view(2, -1),
        "key": heads[:, 3],
        "head_size": 64,
        "cos_sin_cache": table,
    }
    fi.apply_rope_with_cos_sin_cache_inplace(**given)
    for spoiled, message in (
        ({"cos_sin_cache": table.bfloat16()}, "is not contiguous float32"),
        ({"positions": ints(0, 10)}, "position 10 of a table of 10"),
        ({"positions": torch.tensor([0, 1])}, "positions is torch.int64"),
        ({"positions": ints(0)}, r"positions has the shape \(1,\), not \(2,\)"),
        ({"head_size": 32}, "no kernel for head_size 32"),
    ):
        with pytest.raises(Refused, match=message):
            fi.apply_rope_with_cos_sin_cache_inplace(**(given | spoiled))


def test_keys_and_values_go_only_where_their_sequence_has_room(fi: FlashInferStandIn) -> None:
    k, v = torch.zeros(2, 5, 16, 2, 64, dtype=HALF)
    given: dict[str, Any] = {
        "append_key": torch.ones(2, 2, 64, dtype=HALF),
        "append_value": torch.ones(2, 2, 64, dtype=HALF),
        "batch_indices": ints(0, 1),
        "positions": ints(3, 17),
        "paged_kv_cache": (k, v),
        "kv_indices": ints(4, 0, 2),
        "kv_indptr": ints(0, 1, 3),
        "kv_last_page_len": ints(4, 2),
    }
    fi.append_paged_kv_cache(**given)
    assert k[4, 3].all()
    assert k[2, 1].all()
    assert int(k.count_nonzero()) == 2 * 2 * 64
    for spoiled, message in (
        ({"positions": ints(4, 17)}, "position 4 of a sequence of 4"),
        ({"batch_indices": ints(0, 2)}, "sequence 2 of 2"),
        ({"kv_indices": ints(4, 0, 5)}, "page 5 of a cache of 5"),
        ({"paged_kv_cache": (k.half(), v.half())}, "is appended to a cache of torch.float16: not converted"),
        ({"append_value": torch.ones(2, 1, 64, dtype=HALF)}, "append_value has the shape"),
        ({"kv_layout": "HND"}, "knows no layout HND"),
    ):
        with pytest.raises(Refused, match=message):
            fi.append_paged_kv_cache(**(given | spoiled))


# ------------------------------------------------------------------------------------------------ signatures


def test_lengths_follow_from_pages_as_in_the_package(fi: FlashInferStandIn) -> None:
    assert fi.get_seq_lens(ints(0, 1, 3), ints(5, 2), 16).tolist() == [5, 18]


def test_signatures_are_read_without_importing_anything(tmp_path: Path) -> None:
    sys.path.insert(0, str(TOOL.parent))
    try:
        names = __import__(TOOL.stem).NAMES
    finally:
        sys.path.remove(str(TOOL.parent))
    functions = "\n".join(f"def {name}(x, y=1, *, z: int = 2): ..." for name in names if name[0].islower())
    classes = "\n".join(
        f"class {name}:\n    def __init__(self, w, *args, **kwargs): ...\n"
        "    @overload\n    def run(self): ...\n    def run(self, q, out=None): ...\n"
        for name in names
        if name[0].isupper()
    )
    wheel = tmp_path / "flashinfer_python-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flashinfer/__init__.py", f"from .all import {', '.join(names)}\nimport no_such_thing\n")
        archive.writestr("flashinfer/all.py", f"raise SystemExit\n{functions}\n{classes}")
        archive.writestr("flashinfer/_build_meta.py", "__version__ = '9.9'")
    found = json.loads(subprocess.run([sys.executable, TOOL, wheel], capture_output=True, check=True).stdout)
    assert found["version"] == "9.9"
    assert [p["name"] for p in found["signatures"]["BatchDecodeWithPagedKVCacheWrapper.run"]] == ["self", "q", "out"]
    assert found["signatures"]["rmsnorm"] == [
        {"name": "x", "kind": "POSITIONAL_OR_KEYWORD"},
        {"name": "y", "kind": "POSITIONAL_OR_KEYWORD", "default": 1},
        {"name": "z", "kind": "KEYWORD_ONLY", "default": 2},
    ]


def test_the_stored_signatures_are_those_of_the_installed_package() -> None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed; its signatures of 0.6.13 and 0.7.4 are stored")
    done = subprocess.run([sys.executable, TOOL, Path(spec.origin).parent], capture_output=True, check=True, text=True)
    found = json.loads(done.stdout)
    if found["version"] not in VERSIONS:
        pytest.skip(f"flashinfer {found['version']} is installed; stored are {', '.join(VERSIONS)}")
    assert found == stored(found["version"])
