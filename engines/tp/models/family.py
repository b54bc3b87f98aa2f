"""What a family of models is to this engine: how its config.json is read, and what its weights are called."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from tllm_core.errors import ModelError

SLIDING, FULL = "sliding_attention", "full_attention"


class WeightNames(Struct, frozen=True, kw_only=True):
    """What the tensors are called, without `.weight` and `.bias`; those of a layer begin with `layer` and its number.

    qkv, gate_up: one name per part, or a single one where the checkpoint holds them stacked. None: the model has none.
    """

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    norm: str = "model.norm"
    layer: str = "model.layers"
    attention_norm: str = "input_layernorm"
    post_attention_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


class Family(Struct, frozen=True, kw_only=True):
    """One family. `fields`: from a config.json to what is not the same in all families, as fields of ModelConfig.

    defaults: of config.json fields that may be missing, as transformers has them. `fields` raises ModelError, without the
    file's name, for values that can't be used, and KeyError for missing ones.
    """

    architecture: str
    model_type: str
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    names: WeightNames = WeightNames()
    defaults: dict[str, Any] = {}


def require(raw: dict[str, Any], field: str, supported: Any, default: Any = None) -> None:
    """Raises ModelError where config.json asks for anything but `supported`."""
    value = raw.get(field, default if default is not None else supported)
    if value != supported:
        raise ModelError(f"{field} {value!r} is not supported; supported is {supported!r}")


def windows_of(raw: dict[str, Any], window: int | None, default: list[str]) -> tuple[int | None, ...]:
    """Per layer its window or None, by `layer_types`, or by `default` where config.json has none.

    Raises ModelError for a list that does not fit the layers, or a type that is not known.
    """
    kinds = raw.get("layer_types") or default
    if len(kinds) != raw["num_hidden_layers"]:
        raise ModelError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {raw['num_hidden_layers']}")
    unknown = next((kind for kind in kinds if kind not in (SLIDING, FULL)), None)
    if unknown is not None:
        raise ModelError(f"layer type {unknown!r} is not supported; supported are {FULL!r} and {SLIDING!r}")
    if window is None and SLIDING in kinds:
        raise ModelError("layer_types has sliding layers, but sliding_window is not set")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def rope_of(
    raw: dict[str, Any], theta: float = 10000.0, kind: str | None = None, *, partial: bool = False
) -> dict[str, Any]:
    """Rope parameters in one spelling: `rope_parameters` of transformers 5, `rope_theta` with `rope_scaling` before it.

    kind: of the layers that they are for, where parameters may be given per layer type. partial: whether the family knows
    heads of which a part is turned; raises ModelError where another one's config.json asks for that.
    """
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if kind is not None and (FULL in rope or SLIDING in rope):
        rope = dict(rope.get(kind) or {})
    rope["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or theta
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["max_position_embeddings"] = raw["max_position_embeddings"]
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope["original_max_position_embeddings"] = original or raw["max_position_embeddings"]
    share = rope.setdefault("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not partial:
        raise ModelError(f"partial_rotary_factor {share!r} is not supported in this architecture")
    return rope
