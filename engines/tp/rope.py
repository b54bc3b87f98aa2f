"""Rotary position embedding: one table of cosines and sines per model, whatever scaling its config asks for."""

import math
from typing import Any

import torch

from tllm_core.errors import ModelError

SUPPORTED_SCALINGS = ("default", "linear", "llama3")


def rope_table(parameters: dict[str, Any], head_dim: int, max_positions: int) -> torch.Tensor:
    """float32 [max_positions, head_dim]: cosines in the first half of a row, sines in the second.

    `parameters` are a config's rope_parameters (`rope_type`, `rope_theta`, factors). All scalings are baked in, so that
    every kernel applies the same plain rotation. Raises ModelError for a scaling that is not supported.
    """
    frequencies = _frequencies(parameters, head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(parameters: dict[str, Any], head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: torch.Tensor = 1.0 / (parameters.get("rope_theta", 10000.0) ** exponents)
    match parameters.get("rope_type", "default"):
        case "default":
            return frequencies
        case "linear":
            return frequencies.div(parameters["factor"])
        case "llama3":
            return _llama3(frequencies, parameters)
        case other:
            raise ModelError(f"rope scaling {other!r} is not supported; supported are {', '.join(SUPPORTED_SCALINGS)}")


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    factor: float = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth: torch.Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def rotation(table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate` needs for tokens at `positions` [tokens]: two tensors [tokens, 1, head_dim] in `dtype`."""
    cos, sin = table.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of each head of `heads` [tokens, heads, head_dim] against each other; a new tensor."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, swapped, signed_sin)
