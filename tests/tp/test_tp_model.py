"""The model against transformers on small random weights: logits, chunks, block sizes, rope scalings, biases, types."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.config import read_config
from tllm_core.engines.tp.linear import Linear
from tllm_core.engines.tp.rope import rope_table, rotate, rotation
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError, ModelError

transformers = pytest.importorskip("transformers")

VOCAB = 160
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "a head per kv head": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
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


def reference(options: dict[str, Any], seed: int = 0) -> Any:
    """A small Llama whose logits are spread widely enough for 1e-4 to mean something."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
            **options,
        }
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("model")
    model = reference(VARIANTS[request.param])
    model.save_pretrained(directory)
    return model, directory


def load(directory: Path, **settings: Any) -> Runner:
    runner = Runner(TpSettings(**{"model": str(directory), "num_blocks": 64, "threads": 2, **settings}))
    runner.load(lambda name, done: None)
    return runner


def forward(
    runner: Runner, parts: list[tuple[list[int], int, list[int]]], rows: list[int] | None = None
) -> torch.Tensor:
    """Runs (new tokens, context length, block table) per sequence; logits of all tokens unless `rows` says which."""
    tokens = array("i", [token for new, _, _ in parts for token in new])
    return runner.execute(
        ScheduledBatch(
            token_ids=tokens,
            query_lens=[len(new) for new, _, _ in parts],
            context_lens=[context for _, context, _ in parts],
            block_tables=[table for _, _, table in parts],
            logits_rows=list(range(len(tokens))) if rows is None else rows,
        )
    )


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def prompt_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


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
    model = reference({})
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
    with pytest.raises(ModelError, match=r"'yarn' is not supported; supported are default, linear, llama3"):
        rope_table({"rope_type": "yarn"}, 8, 4)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    table = rope_table({"rope_theta": 10000.0}, 16, 100)
    q, k = torch.randn(2, 1, 1, 16)

    def score(at: int, to: int) -> torch.Tensor:
        a = rotate(q, *rotation(table, torch.tensor([at]), torch.float32))
        b = rotate(k, *rotation(table, torch.tensor([to]), torch.float32))
        torch.testing.assert_close(a.norm(), q.norm())
        return (a * b).sum()

    torch.testing.assert_close(score(7, 3), score(77, 73), atol=1e-5, rtol=1e-5)
    assert abs(score(7, 3) - score(7, 5)) > 1e-3


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


def test_the_config_gives_limits_ends_and_recommended_sampling(plain: tuple[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((plain[1] / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [7, 9], "do_sample": true, "top_p": 0.9, "max_length": 20}'
    )
    config = read_config(tmp_path, "small")
    assert (config.name, config.vocab_size, config.max_position_embeddings) == ("small", VOCAB, 256)
    assert config.eos_token_ids == (7, 9)
    assert config.generation_defaults == {"temperature": 1.0, "top_p": 0.9}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is no valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"architectures": ["GPT2LMHeadModel"]}', "'GPT2LMHeadModel' is not supported; supported is LlamaForCausalLM"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}', "activation 'gelu' is not supported"),
        ('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}', "lacks 'vocab_size'"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
