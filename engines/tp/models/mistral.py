"""Mistral: a Llama whose layers may all have the same sliding window."""

from typing import Any

from tllm_core.engines.tp.models.family import SLIDING, Family, require, rope_of, windows_of


def _fields(raw: dict[str, Any]) -> dict[str, Any]:
    require(raw, "hidden_act", "silu")
    window = raw["sliding_window"]
    layers = raw["num_hidden_layers"]
    if raw.get("layer_types") is not None:
        return {"windows": windows_of(raw, window, []), "rope": rope_of(raw)}
    return {
        "windows": windows_of(raw, window, [SLIDING] * layers) if window else (None,) * layers,
        "rope": rope_of(raw),
    }


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields=_fields,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
