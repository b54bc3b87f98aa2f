"""What a decoder computes between its matrix products and attention, so that no model names the library that does it."""

from abc import ABC, abstractmethod
from typing import Protocol, TypeAlias

import torch

__all__ = ["Norm", "Ops", "Product", "Rotation"]

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""What `Ops.rotate` needs for the tokens of a step; only the table that made it knows what it is."""


class Product(Protocol):
    """A matrix product with weights, summed over ranks where it is split: [rows, in] -> [rows, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [rows, out] plus the product."""


class Norm(ABC):
    """RMS normalisation over the last axis: `x / sqrt(mean(x^2) + eps) * (weight + offset)`."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size] or [rows, heads, size]; the same shape, a new tensor."""

    @abstractmethod
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum), [rows, size] each; they may take the memory of `x` and `residual`."""

    def after(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`add` of a product of `x`: how a decoder goes from one half of a layer to the next."""
        return self.add(product(x), residual)

    @abstractmethod
    def move_to(self, device: torch.device) -> None:
        """Puts the weight aside to, or back from, another device."""


class Ops(ABC):
    """A table of kernels for one device; all of a model's come from the same one.

    fuses_activations: whether products may activate by themselves, where they can, instead of a kernel of this table.
    """

    fuses_activations: bool = False

    @abstractmethod
    def norm(self, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> Norm:
        """weight: [size], in the model's type and on its device."""

    @abstractmethod
    def rotation(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Once per step. dtype: of the heads that will be rotated.

        table: float32 [max_positions, rotary_dim], cosines then sines. positions: int32 [tokens].
        """

    @abstractmethod
    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> None:
        """heads: [tokens, heads, head_dim], of queries and keys together; rotated in place."""

    @abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, 2 * inner], the gate first; `silu(gate) * up` [tokens, inner]."""

    @abstractmethod
    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_and_mul`, with the tanh approximation of GELU."""
