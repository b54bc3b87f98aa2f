"""The table of FlashInfer's kernels, for bfloat16 and float16 on a GPU. Norms and rotations work in place."""

from typing import Any

import torch

from tllm_core.engines.tp.ops import Norm, Ops, Rotation


class FlashInferNorm(Norm):
    """`weight` has the type of the rows: the kernel reads both as the same."""

    __slots__ = ("_add", "_eps", "_norm", "_weight")

    def __init__(self, flashinfer: Any, weight: torch.Tensor, eps: float, offset: float) -> None:
        if offset not in (0.0, 1.0):
            raise ValueError(f"FlashInfer's norms add 0 or 1 to a weight, not {offset}")
        self._weight, self._eps = weight, eps
        # Gemma's: 1 is added in float32, where adding it to the weight itself would round.
        self._norm = flashinfer.gemma_rmsnorm if offset else flashinfer.rmsnorm
        self._add = flashinfer.gemma_fused_add_rmsnorm if offset else flashinfer.fused_add_rmsnorm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._norm(x, self._weight, eps=self._eps)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._add(x, residual, self._weight, eps=self._eps)
        return x, residual

    def move_to(self, device: torch.device) -> None:
        self._weight = self._weight.to(device)


class FlashInferOps(Ops):
    def __init__(self, flashinfer: Any) -> None:
        self._flashinfer = flashinfer

    def norm(self, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> Norm:
        return FlashInferNorm(self._flashinfer, weight, eps, offset)

    def rotation(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        return table, positions

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        table, positions = rotation
        tokens, _, head_dim = heads.shape
        # Queries and keys are turned alike, so that it does not matter which heads are called which.
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions=positions,
            query=heads[:, :-1].view(tokens, -1),
            key=heads[:, -1],
            head_size=head_dim,
            cos_sin_cache=table,
            is_neox=True,
        )

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self._flashinfer.silu_and_mul(x)
        return gated

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self._flashinfer.gelu_tanh_and_mul(x)
        return gated
