"""The ranks of one model, and what they compute together."""

from abc import ABC, abstractmethod
from array import array

import torch


class Group(ABC):
    """The ranks of one model. Every method is collective: all ranks call the same ones, in the same order.

    rank: this one's number, 0 to size - 1. Tensors are of the same shape and type on all ranks unless said otherwise.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on all, on a CPU in rank order; in `x` itself where that can be."""

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """`x` [rows, n] of every rank side by side, [rows, size * n], on rank 0; None on others."""

    @abstractmethod
    def broadcast(self, values: "array[int] | None") -> "array[int]":
        """Rank 0's int32 `values` on all ranks; others give None."""

    @abstractmethod
    def close(self) -> None:
        """Ends the group. May be called more than once, and where peers are gone."""


class Alone(Group):
    """One rank: what it computes is the whole."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def broadcast(self, values: "array[int] | None") -> "array[int]":
        """`values` themselves. Raises ValueError for None: rank 0 has something to say."""
        if values is None:
            raise ValueError("rank 0 broadcasts, it does not wait for a broadcast")
        return values

    def close(self) -> None: ...
