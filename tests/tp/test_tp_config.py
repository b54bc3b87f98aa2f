"""What config.json may say in each family, in old files and new ones, and every way it can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tllm_core.engines.tp.config import ModelConfig, read_config
from tllm_core.errors import ModelError

PLAIN: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def read(directory: Path, architecture: str, **fields: Any) -> ModelConfig:
    written = {"architectures": [architecture], **PLAIN, **fields}
    (directory / "config.json").write_text(json.dumps(written))
    return read_config(directory)


def test_the_config_gives_limits_ends_and_recommended_sampling(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [7, 9], "do_sample": true, "top_p": 0.9, "max_length": 20}'
    )
    config = read(tmp_path, "LlamaForCausalLM", eos_token_id=3)
    assert (config.name, config.vocab_size, config.max_position_embeddings) == (tmp_path.name, 160, 256)
    assert config.eos_token_ids == (7, 9)
    assert config.generation_defaults == {"temperature": 1.0, "top_p": 0.9}


def test_a_file_without_architectures_is_read_by_its_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **PLAIN}))
    config = read_config(tmp_path)
    assert (config.architecture, config.head_dim) == ("Qwen3ForCausalLM", 128)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096, 4096)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Phi3ForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Phi3ForCausalLM", {}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 1}, (None, None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8, None)),
        ("Gemma3ForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, (None, None, None, None)),
    ],
)
def test_windows_of_each_family(
    tmp_path: Path, architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, architecture, **fields).windows == windows


def test_ropes_of_gemma_in_old_files(tmp_path: Path) -> None:
    """The scaling is for layers without a window alone."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read(
        tmp_path, "Gemma3ForCausalLM", rope_theta=9e5, rope_local_base_freq=2e4, rope_scaling=scaling, head_dim=16
    )
    assert (config.rope["rope_type"], config.rope["rope_theta"], config.rope["factor"]) == ("linear", 9e5, 8.0)
    assert config.local_rope is not None
    assert (config.local_rope["rope_type"], config.local_rope["rope_theta"]) == ("default", 2e4)


def test_ropes_of_gemma_that_are_not_written(tmp_path: Path) -> None:
    config = read(tmp_path, "Gemma3ForCausalLM")
    assert config.local_rope is not None
    assert (config.rope["rope_theta"], config.local_rope["rope_theta"]) == (1e6, 1e4)
    assert config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_longrope_of_phi3_by_all_its_names(tmp_path: Path, kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = read(
        tmp_path,
        "Phi3ForCausalLM",
        rope_scaling=scaling,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
    )
    assert config.rope["rope_type"] == "longrope"
    assert config.rope["partial_rotary_factor"] == 0.75
    assert config.rope["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is no valid JSON"),
        ("[]", "holds no JSON object"),
        (
            '{"architectures": ["GPT2LMHeadModel"]}',
            "config.json: architecture 'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM, "
            "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM, Phi3ForCausalLM$",
        ),
        ("{}", "architecture 'unknown' is not supported"),
        (
            '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}',
            "lacks '.*', which LlamaForCausalLM needs",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        ("LlamaForCausalLM", {"vocab_size": "many"}, "vocab_size is 'many', and must be a positive number"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a positive number"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "4 heads of 16 over 3 kv heads: not a multiple"),
        ("LlamaForCausalLM", {"head_dim": 15}, "4 heads of 15 over 2 kv heads: .* odd size"),
        ("LlamaForCausalLM", {"rms_norm_eps": "small"}, "has a value that can't be used: Expected `float`, got `str`"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported in this arch"),
        (
            "LlamaForCausalLM",
            {"quantization_config": {"quant_method": "gptq"}},
            "weights in gptq are not supported; use",
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["full_attention"]},
            "layer_types names 1 layers, and num_hidden_layers is 4",
        ),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked"] * 4}, "layer type 'chunked' is not supported"),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 4},
            "sliding layers, but sliding_window is not set",
        ),
        ("Gemma3ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ],
)
def test_a_value_that_this_engine_cannot_honour_is_named(
    tmp_path: Path, architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"config.json.*{message}"):
        read(tmp_path, architecture, **fields)
