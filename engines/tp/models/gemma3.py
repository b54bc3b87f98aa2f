"""Gemma 3, text only: most layers see a sliding window and have a rope of their own; each half of a layer is normalised
before and after; norms multiply by one plus their weight; embeddings are scaled by the root of their size.
"""

from typing import Any

from tllm_core.engines.tp.models.family import FULL, SLIDING, Family, WeightNames, require, rope_of, windows_of
from tllm_core.errors import ModelError


def _fields(raw: dict[str, Any]) -> dict[str, Any]:
    require(raw, "hidden_activation", "gelu_pytorch_tanh")
    require(raw, "attn_logit_softcapping", None)
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported: tokens see only those before them")
    bias, layers = raw.get("attention_bias", False), raw["num_hidden_layers"]
    every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    return {
        "activation": "gelu_tanh",
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "attention_scale": raw["query_pre_attn_scalar"] ** -0.5,
        "logit_softcap": raw.get("final_logit_softcapping"),
        "windows": windows_of(
            raw, raw["sliding_window"], [SLIDING if (i + 1) % every else FULL for i in range(layers)]
        ),
        "rope": rope_of(raw, 1_000_000.0, FULL),
        "local_rope": _local_rope(raw),
    }


def _local_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """That of sliding layers. Older files have only its base; the scaling beside it is for full layers alone."""
    if SLIDING in (raw.get("rope_parameters") or {}):
        return rope_of({**raw, "rope_scaling": None, "rope_theta": None}, 10_000.0, SLIDING)
    theta = raw.get("rope_local_base_freq") or 10_000.0
    return rope_of({"max_position_embeddings": raw["max_position_embeddings"]}, theta)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    fields=_fields,
    names=WeightNames(
        post_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
    ),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
)
