"""The table of plain torch: any device and type, and the reference for faster ones."""

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.norm import RmsNorm
from tllm_core.engines.tp.ops import Norm, Ops, Rotation
from tllm_core.engines.tp.rope import rotate, rotation


class TorchOps(Ops):
    fuses_activations = True

    def norm(self, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> Norm:
        # One plus a small weight loses most of that weight in a short type.
        return RmsNorm(weight.float() + offset if offset else weight, eps)

    def rotation(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        return rotation(table, positions, dtype)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        rotate(heads, *rotation)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
