"""Rotary position embedding: one table of cosines and sines per rope of a model, whatever scaling its config asks for.

Two scalings depend on how long a sequence is, `dynamic` and `longrope`. Keys are cached rotated, and shared by sequences of
any length, so here they depend on how long sequences may become (`max_positions`), once per engine.
"""

import math
from typing import Any

import torch

from tllm_core.errors import ModelError

SUPPORTED_SCALINGS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def rope_table(parameters: dict[str, Any], head_dim: int, max_positions: int) -> torch.Tensor:
    """float32 [max_positions, rotary_dim]: cosines in the first half of a row, sines in the second.

    `parameters` are a config's rope_parameters (`rope_type`, `rope_theta`, factors, and max_position_embeddings where a
    scaling needs it). rotary_dim: how much of each head is turned, head_dim unless `partial_rotary_factor` says less.
    All scalings are baked in, so that every kernel applies the same plain rotation. Raises ModelError for a scaling that is
    not supported or lacks a parameter.
    """
    kind = parameters.get("rope_type", "default")
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    try:
        frequencies, scale = _scaled(kind, parameters, rotary_dim, max_positions)
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r} lacks {error.args[0]!r}") from None
    if frequencies.shape[0] != rotary_dim // 2:
        raise ModelError(
            f"rope scaling {kind!r} has factors for {frequencies.shape[0]} of {rotary_dim // 2} frequencies"
        )
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def most_positions(parameters: dict[str, Any], max_position_embeddings: int) -> int:
    """How long a sequence may be at most: beyond the model's own limit where its rope stretches with the length."""
    if parameters.get("rope_type") == "dynamic":
        return int(max_position_embeddings * parameters.get("factor", 1.0))
    return max_position_embeddings


def _scaled(kind: str, parameters: dict[str, Any], dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Frequencies [dim / 2], and what cosines and sines are multiplied by."""
    theta = parameters.get("rope_theta", 10000.0)
    match kind:
        case "default":
            return _frequencies(theta, dim), 1.0
        case "linear":
            return _frequencies(theta, dim).div(parameters["factor"]), 1.0
        case "dynamic":
            return _frequencies(_dynamic_theta(theta, parameters, dim, max_positions), dim), 1.0
        case "llama3":
            return _llama3(_frequencies(theta, dim), parameters), 1.0
        case "yarn":
            return _yarn(theta, parameters, dim)
        case "longrope":
            return _longrope(_frequencies(theta, dim), parameters, max_positions)
        case other:
            raise ModelError(f"rope scaling {other!r} is not supported; supported are {', '.join(SUPPORTED_SCALINGS)}")


def _frequencies(theta: float, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies: torch.Tensor = 1.0 / (theta**exponents)
    return frequencies


def _dynamic_theta(theta: float, parameters: dict[str, Any], dim: int, max_positions: int) -> float:
    """As for a sequence of `max_positions` (NTK): unchanged up to the length that the model was made for."""
    factor, own = float(parameters["factor"]), parameters["max_position_embeddings"]
    stretch: float = factor * max(max_positions, own) / own - (factor - 1)
    return float(theta * stretch ** (dim / (dim - 2)))


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    factor: float = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth: torch.Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn(theta: float, parameters: dict[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often within the original length are kept, those that turn seldom stretched (YaRN)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or parameters["max_position_embeddings"] / original

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp_(0.0, 1.0)
    frequencies = _frequencies(theta, dim)
    return frequencies / factor * stretched + frequencies * (1 - stretched), _yarn_scale(factor, parameters)


def _yarn_scale(factor: float, parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)


def _longrope(frequencies: torch.Tensor, parameters: dict[str, Any], max_positions: int) -> tuple[torch.Tensor, float]:
    """A factor per dimension, of two sets: the long ones where sequences may exceed the original length (LongRoPE)."""
    original = parameters["original_max_position_embeddings"]
    factors = parameters["long_factor" if max_positions > original else "short_factor"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    if len(factors) != frequencies.shape[0]:
        return torch.tensor(factors), scale  # refused by its length
    return frequencies / torch.tensor(factors, dtype=torch.float32), float(scale)


def rotation(table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate` needs for tokens at `positions` [tokens]: two tensors [tokens, 1, rotary_dim] in `dtype`."""
    cos, sin = table.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotates the halves of what is turned of each head [tokens, heads, head_dim] against each other, in place."""
    rotary_dim = cos.shape[-1]
    turned = heads if rotary_dim == heads.shape[-1] else heads[..., :rotary_dim]
    swapped = torch.roll(turned, rotary_dim // 2, dims=-1)
    turned.mul_(cos).addcmul_(swapped, signed_sin)
