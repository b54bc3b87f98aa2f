"""What a model directory says of itself: config.json and generation_config.json, checked."""

import json
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from tllm_core.engines.tp.models import family_of
from tllm_core.engines.tp.models.family import Family, WeightNames
from tllm_core.errors import ModelError

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder's shape, what its layers compute, and its limits.

    qkv_bias, out_bias, mlp_bias: which products add one. norm_offset: what norms add to their weights. attention_scale:
    of scores. embedding_scale: of what is looked up. logit_softcap: logits become `cap * tanh(logits / cap)`.
    windows: per layer how many tokens each token sees, itself included, None = all. rope: rope_type, rope_theta and
    factors, as transformers names them; local_rope: that of layers with a window, None = the same.
    names: what the tensors are called on disk; torch_dtype: their type there.
    generation_defaults: sampling fields that the model's authors recommend.
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
    attention_scale: float
    windows: tuple[int | None, ...]
    rope: dict[str, Any]
    local_rope: dict[str, Any] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    names: WeightNames
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]

    @property
    def window(self) -> int | None:
        """How many tokens back any layer sees, its own included; None = all that there are."""
        widest = 0
        for window in self.windows:
            if window is None:
                return None
            widest = max(widest, window)
        return widest

    def difference(self, other: "ModelConfig") -> str | None:
        """The first field in which weights of `other` do not fit this model, None = they do."""
        own = ("name", "model_dir", "torch_dtype", "eos_token_ids", "generation_defaults")
        fields = (field for field in self.__struct_fields__ if field not in own)
        return next((field for field in fields if getattr(self, field) != getattr(other, field)), None)


def name_of(model: str) -> str:
    """What people call the model of the setting `model`."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model


def read_config(directory: Path, name: str | None = None) -> ModelConfig:
    """Reads a Hugging Face directory's configuration; `name` is what people call the model, the directory's by default.

    Raises ModelError for a missing or broken file, a missing field, or a model that this engine can't run.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    generation = _read_json(directory / "generation_config.json", optional=True)
    try:
        family = family_of(raw)
        return _config(raw, generation, family, name or directory.name, directory)
    except KeyError as error:
        raise ModelError(f"{path} lacks {error.args[0]!r}, which {family.architecture} needs") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (ValidationError, TypeError) as error:
        raise ModelError(f"{path} has a value that can't be used: {error}") from None


def _config(
    written: dict[str, Any], generation: dict[str, Any], family: Family, name: str, directory: Path
) -> ModelConfig:
    raw = _checked({**family.defaults, **written})
    fields = {
        "name": name,
        "model_dir": str(directory),
        "architecture": family.architecture,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw["num_key_value_heads"],
        "head_dim": raw["head_dim"],
        "attention_scale": raw["head_dim"] ** -0.5,
        "windows": (None,) * raw["num_hidden_layers"],
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": raw["max_position_embeddings"],
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "torch_dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
        "eos_token_ids": _eos(generation, raw),
        "generation_defaults": _sampling_defaults(generation),
        **family.fields(raw),
    }
    return convert({**fields, "names": family.names}, ModelConfig)


def _checked(raw: dict[str, Any]) -> dict[str, Any]:
    """With the number of kv heads and their size filled in. Raises ModelError for sizes that can't be meant."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "quantized")
        raise ModelError(f"weights in {method} are not supported; use the model's unquantized weights, or a GGUF file")
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    raw = {**raw, "num_key_value_heads": kv_heads, "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads}
    for field in _SIZES:
        if type(raw[field]) is not int or raw[field] < 1:
            raise ModelError(f"{field} is {raw[field]!r}, and must be a positive number")
    if heads % kv_heads or raw["head_dim"] % 2:
        raise ModelError(f"{heads} heads of {raw['head_dim']} over {kv_heads} kv heads: not a multiple, or an odd size")
    return raw


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
