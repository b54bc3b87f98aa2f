"""Llama against transformers on small random weights: logits, chunks, block sizes, rope scalings, biases, types."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tests.tp.reference import VOCAB, expected, forward, load, prompt_of, reference
from tllm_core.engines.tp.linear import Gated, Linear
from tllm_core.engines.tp.norm import RmsNorm
from tllm_core.engines.tp.ops.torch import TorchOps
from tllm_core.engines.tp.rope import rope_table, rotate, rotation
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError, ModelError

transformers = pytest.importorskip("transformers")

_FACTORS = [1.0, 1.1, 1.3, 1.4, 1.6, 2.0, 2.5, 3.0]
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "a head per kv head": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn rope with a scale and other bounds": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
            "original_max_position_embeddings": 32,
        }
    },
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 6.0,
            "short_factor": [1.0] * 8,
            "long_factor": _FACTORS,
            "original_max_position_embeddings": 32,
        }
    },
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("model")
    model = reference("Llama", VARIANTS[request.param])
    model.save_pretrained(directory)
    return model, directory


def test_logits_of_a_whole_prompt(pair: tuple[Any, Path]) -> None:
    model, directory = pair
    prompt = prompt_of(70)
    logits = forward(load(directory), [(prompt, 0, [5, 2, 9, 7, 1])])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected(model, prompt), atol=1e-4, rtol=0)


def test_logits_in_chunks_and_token_by_token(pair: tuple[Any, Path]) -> None:
    model, directory = pair
    prompt, table, runner = prompt_of(40), [3, 1, 8], load(directory)
    found, at = [], 0
    for size in (7, 16, 1, 1, 14, 1):
        found.append(forward(runner, [(prompt[at : at + size], at, table)]))
        at += size
    torch.testing.assert_close(torch.cat(found), expected(model, prompt), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("plain")
    model = reference("Llama", {})
    model.save_pretrained(directory)
    return model, directory


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 64])
def test_decoding_and_prompts_share_a_batch_at_any_block_size(plain: tuple[Any, Path], block_size: int) -> None:
    model, directory = plain
    runner = load(directory, block_size=block_size, num_blocks=400)
    prompts = [prompt_of(length, seed=length) for length in (3, 50, 21, 33)]
    tables, at = [], 1
    for prompt in prompts:
        pages = -(-len(prompt) // block_size)
        tables.append(list(range(at, at + pages))[::-1])
        at += pages
    forward(runner, [(prompts[0][:-1], 0, tables[0]), (prompts[1][:-1], 0, tables[1]), (prompts[2][:9], 0, tables[2])])
    logits = forward(
        runner,
        [
            (prompts[0][-1:], 2, tables[0]),
            (prompts[1][-1:], 49, tables[1]),
            (prompts[2][9:], 9, tables[2]),
            (prompts[3], 0, tables[3]),
        ],
    )
    wanted = [expected(model, prompt) for prompt in prompts]
    together = torch.cat([wanted[0][-1:], wanted[1][-1:], wanted[2][9:], wanted[3]])
    torch.testing.assert_close(logits, together, atol=1e-4, rtol=0)


def test_only_the_wanted_rows_get_logits_and_every_row_gets_its_keys(plain: tuple[Any, Path]) -> None:
    model, directory = plain
    prompt, runner = prompt_of(30), load(directory)
    logits = forward(runner, [(prompt[:29], 0, [0, 1])], rows=[4, 28])
    torch.testing.assert_close(logits, expected(model, prompt)[[4, 28]], atol=1e-4, rtol=0)
    after = forward(runner, [(prompt[29:], 29, [0, 1])])
    torch.testing.assert_close(after, expected(model, prompt)[29:], atol=1e-4, rtol=0)


def test_a_chunk_without_wanted_rows_still_fills_the_cache(plain: tuple[Any, Path]) -> None:
    model, directory = plain
    prompt, runner = prompt_of(20), load(directory)
    assert forward(runner, [(prompt[:12], 0, [4, 2])], rows=[]).shape == (0, VOCAB)
    logits = forward(runner, [(prompt[12:], 12, [4, 2])])
    torch.testing.assert_close(logits, expected(model, prompt)[12:], atol=1e-4, rtol=0)


def test_bfloat16_stays_within_its_own_precision_of_transformers(plain: tuple[Any, Path]) -> None:
    model, directory = plain
    prompt = prompt_of(48)
    logits = forward(load(directory, dtype="bfloat16"), [(prompt, 0, [0, 1, 2])])
    rounded = type(model).from_pretrained(directory, dtype=torch.bfloat16).eval()
    exact, rough = expected(model, prompt), expected(rounded, prompt).float()
    assert logits.dtype == torch.float32
    # No further from the unrounded model than transformers' own bfloat16 is, and close to that.
    assert (logits - exact).abs().mean() <= 1.1 * (rough - exact).abs().mean()
    torch.testing.assert_close(logits, rough, atol=0.06 * float(rough.abs().max()), rtol=0)


def test_a_longer_limit_than_the_models_is_refused_with_both_numbers(plain: tuple[Any, Path]) -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len 300 is above the 256 positions"):
        load(plain[1], max_seq_len=300)


def test_the_cache_is_sized_from_free_memory_but_not_beyond_what_can_be_used(plain: tuple[Any, Path]) -> None:
    runner = load(plain[1], num_blocks=None, max_num_seqs=3, block_size=16)
    assert runner.num_blocks == 3 * 256 // 16


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="'nonsense'"):
        Runner(TpSettings(model="x", device="nonsense"))


def test_an_unknown_rope_scaling_names_what_is_supported() -> None:
    with pytest.raises(ModelError, match=r"'mrope' is not supported; supported are default, linear, dynamic, yarn,"):
        rope_table({"rope_type": "mrope"}, 8, 4)


def test_a_rope_scaling_without_its_factor_says_so() -> None:
    with pytest.raises(ModelError, match="'linear' lacks 'factor'"):
        rope_table({"rope_type": "linear"}, 8, 4)


def test_longrope_factors_of_another_size_are_refused_with_both() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3, "factor": 2.0}
    with pytest.raises(ModelError, match="factors for 3 of 4 frequencies"):
        rope_table({**rope, "original_max_position_embeddings": 4}, 8, 4)


def test_longrope_keeps_its_short_factors_where_sequences_stay_within_the_original_length(tmp_path: Path) -> None:
    model = reference("Llama", VARIANTS["longrope"])
    model.save_pretrained(tmp_path)
    prompt = prompt_of(32)
    logits = forward(load(tmp_path, max_seq_len=32), [(prompt, 0, [0, 1])])
    torch.testing.assert_close(logits, expected(model, prompt), atol=1e-4, rtol=0)


def test_dynamic_rope_stretches_to_the_limit_that_is_asked_for(tmp_path: Path) -> None:
    """As transformers does for a prompt of that length; the model's own limit is where it begins to."""
    model = reference("Llama", {**VARIANTS["dynamic rope"], "max_position_embeddings": 64})
    model.save_pretrained(tmp_path)
    prompt = prompt_of(200)
    logits = forward(load(tmp_path, max_seq_len=200), [(prompt, 0, list(range(13)))])
    torch.testing.assert_close(logits, expected(model, prompt), atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="max_seq_len 257 is above the 256 positions"):
        load(tmp_path, max_seq_len=257)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    table = rope_table({"rope_theta": 10000.0}, 16, 100)
    q, k = torch.randn(2, 1, 1, 16)

    def score(at: int, to: int) -> torch.Tensor:
        a, b = q.clone(), k.clone()
        rotate(a, *rotation(table, torch.tensor([at]), torch.float32))
        rotate(b, *rotation(table, torch.tensor([to]), torch.float32))
        torch.testing.assert_close(a.norm(), q.norm())
        return (a * b).sum()

    torch.testing.assert_close(score(7, 3), score(77, 73), atol=1e-5, rtol=1e-5)
    assert abs(score(7, 3) - score(7, 5)) > 1e-3


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["without-bias", "with-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_is_the_same_in_the_products_kernels_and_behind_them(
    dtype: torch.dtype, with_bias: bool, activation: str
) -> None:
    """The definition in float64; both ways are as near to it as the type allows."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64).to(dtype), torch.randn(2 * 48, 64).to(dtype), torch.randn(2 * 48).to(dtype)
    given = bias if with_bias else None
    gate, up = (x.double() @ weight.double().T + (bias.double() if with_bias else 0)).chunk(2, dim=-1)
    exact = up * (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh"))
    act_and_mul = TorchOps().silu_and_mul if activation == "silu" else TorchOps().gelu_tanh_and_mul
    near = 1e-5 if dtype == torch.float32 else 2**-5
    for way in (activation, None):
        found = Gated(weight, given, way, act_and_mul)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, atol=near * float(exact.abs().max()), rtol=near)


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_rows", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 1e4])
def test_norms_are_exact_before_they_are_rounded_once(
    size: float, of_rows: torch.dtype, of_weight: torch.dtype
) -> None:
    """Whatever the rows' size: where it is small, epsilon is most of what they are divided by; zeros stay zeros."""
    torch.manual_seed(0)
    weight, x = torch.randn(96).to(of_weight), (torch.randn(3, 5, 96) * size).to(of_rows)
    x[1, 2] = 0
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    normed = RmsNorm(weight, 1e-5)(x)
    assert normed.dtype == of_rows
    torch.testing.assert_close(normed, exact.to(of_rows), atol=1e-6, rtol=1e-6 if of_rows == torch.float32 else 2**-7)


@pytest.mark.parametrize("rows", [1, 2, 8, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_equals_the_plain_one(rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x, residual = torch.randn(48, 32), torch.randn(rows, 32), torch.randn(rows, 48)
    bias = torch.randn(48) if with_bias else None
    linear = Linear(weight.clone(), bias)
    plain = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x), plain, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(linear.add_to(residual, x), residual + plain, atol=1e-4, rtol=1e-5)
