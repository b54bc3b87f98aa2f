"""Batch invariance: a row's bits do not depend on which rows are computed beside it.

Kernels of products, sums and activations take another path for another number of rows. So everything but attention is
given blocks of exactly ROWS rows, the last one filled up with zeros; where a row stands in a block was found to change
nothing (tests/tp/test_tp_invariant.py holds that for float32 and bfloat16). Elementwise kernels leave the end of each
thread's part to code without vectors; with a power of two of threads, parts end where rows do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.ops import Norm, Ops, Rotation

ROWS = 64


def in_blocks(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`compute(x)` for x [rows, ...], by blocks of ROWS rows that each begin in memory of their own."""
    count = x.shape[0]
    rest = [0, 0] * (x.dim() - 1)
    blocks = []
    for top in range(0, count or 1, ROWS):
        block = x[top : top + ROWS]
        short = ROWS - block.shape[0]
        blocks.append(compute(F.pad(block, [*rest, 0, short]) if short else block.clone()))
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:count]


def whole_threads(count: int) -> int:
    """The largest power of two that is no more than `count`."""
    return 1 << (count.bit_length() - 1)


class InvariantNorm(Norm):
    """Another norm, block by block."""

    __slots__ = ("_norm",)

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(self._norm, x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self(total), total

    def move_to(self, device: torch.device) -> None:
        self._norm.move_to(device)


class InvariantOps(Ops):
    """Another table, block by block. Rotation multiplies and adds alone, which rounds alike on every path."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.fuses_activations = ops.fuses_activations

    def norm(self, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> Norm:
        return InvariantNorm(self._ops.norm(weight, eps, offset=offset))

    def rotation(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        return self._ops.rotation(table, positions, dtype)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        self._ops.rotate(heads, rotation)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(self._ops.silu_and_mul, x)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(self._ops.gelu_tanh_and_mul, x)
