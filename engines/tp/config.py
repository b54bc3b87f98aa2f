"""What a model directory says of itself: config.json and generation_config.json, checked."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from tllm_core.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder's shape and limits. `rope`: rope_type, rope_theta and factors, as transformers names them.

    generation_defaults: sampling fields that the model's authors recommend. torch_dtype: the type of the weights on disk.
    """

    name: str
    model_dir: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]


def read_config(directory: Path, name: str | None = None) -> ModelConfig:
    """Reads a Hugging Face directory's configuration; `name` is what people call the model, the directory's by default.

    Raises ModelError for a missing or broken file, a missing field, or a model that this engine can't run.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    generation = _read_json(directory / "generation_config.json", optional=True)
    architecture = _architecture(raw, path)
    try:
        return _config(raw, generation, architecture, name or directory.name, directory)
    except KeyError as error:
        raise ModelError(f"{path} lacks {error.args[0]!r}, which {architecture} needs") from None


def _config(
    raw: dict[str, Any], generation: dict[str, Any], architecture: str, name: str, directory: Path
) -> ModelConfig:
    heads = raw["num_attention_heads"]
    return ModelConfig(
        name=name,
        model_dir=str(directory),
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=raw["max_position_embeddings"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        rope=_rope(raw),
        torch_dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        eos_token_ids=_eos(generation, raw),
        generation_defaults=_sampling_defaults(generation),
    )


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path.parent} is no model directory: it has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def _architecture(raw: dict[str, Any], path: Path) -> str:
    named = raw.get("architectures") or [raw.get("model_type", "unknown")]
    if named[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{path}: architecture {named[0]!r} is not supported; supported is {supported}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: activation {raw['hidden_act']!r} is not supported; supported is 'silu'")
    return str(named[0])


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` with `rope_scaling` before it."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _eos(generation: dict[str, Any], raw: dict[str, Any]) -> tuple[int, ...]:
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    if not generation.get("do_sample"):
        return {}
    defaults = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    return {"temperature": 1.0, **defaults}
