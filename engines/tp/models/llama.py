"""Llama 1 to 3, and the many models that are one by another name: SmolLM2, TinyLlama, Yi, DeepSeek's distillates."""

from typing import Any

from tllm_core.engines.tp.models.family import Family, require, rope_of


def _fields(raw: dict[str, Any]) -> dict[str, Any]:
    require(raw, "hidden_act", "silu")
    bias = raw.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": raw.get("mlp_bias", False), "rope": rope_of(raw)}


LLAMA = Family(architecture="LlamaForCausalLM", model_type="llama", fields=_fields)
