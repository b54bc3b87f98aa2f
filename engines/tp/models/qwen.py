"""Qwen2, Qwen2.5 and QwQ: biases at queries, keys and values. Qwen3: norms of each query and key head instead."""

from typing import Any

from tllm_core.engines.tp.models.family import FULL, SLIDING, Family, WeightNames, require, rope_of, windows_of


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    require(raw, "hidden_act", "silu")
    return {"qkv_bias": True, "rope": rope_of(raw), "windows": _windows(raw)}


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    require(raw, "hidden_act", "silu")
    bias = raw.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "rope": rope_of(raw), "windows": _windows(raw)}


def _windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """`sliding_window` counts only beside `use_sliding_window`, and from layer `max_window_layers` on."""
    window = raw["sliding_window"] if raw.get("use_sliding_window") else None
    sliding_from = raw["max_window_layers"] if window is not None else raw["num_hidden_layers"]
    return windows_of(raw, window, [SLIDING if i >= sliding_from else FULL for i in range(raw["num_hidden_layers"])])


_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}

QWEN2 = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", fields=_qwen2, defaults=_DEFAULTS)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=_qwen3,
    names=WeightNames(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    defaults={**_DEFAULTS, "head_dim": 128},
)
