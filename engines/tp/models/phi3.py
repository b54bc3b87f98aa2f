"""Phi-3, Phi-3.5 and Phi-4: weights of equal input are stored stacked; long contexts by longrope; Phi-4-mini turns only a
part of each head.
"""

from typing import Any

from tllm_core.engines.tp.models.family import SLIDING, Family, WeightNames, require, rope_of, windows_of


def _fields(raw: dict[str, Any]) -> dict[str, Any]:
    require(raw, "hidden_act", "silu")
    window, layers = raw.get("sliding_window"), raw["num_hidden_layers"]
    rope = rope_of(raw, partial=True)
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"  # what Phi-3's own files called it before it had a name
    return {"rope": rope, "windows": windows_of(raw, window, [SLIDING] * layers) if window else (None,) * layers}


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    fields=_fields,
    names=WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
)
