"""What an attention backend is: the KV cache's owner, planned once per step and run once per layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from msgspec import Struct

from tllm_core.engines.tp.attention.metadata import AttentionMetadata

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionShape", "CapturableAttention"]


class AttentionShape(Struct, frozen=True, kw_only=True):
    """What a backend is made for: one rank's heads, and its cache.

    dtype: of activations. scale: of scores, None = 1 / sqrt(head_dim). windows: per layer how many tokens each token sees,
    itself included, None = all; () = all in every layer. max_rows: sequences that decode at once, at most.
    max_pages: blocks of one sequence, at most.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float | None = None
    windows: tuple[int | None, ...] = ()
    max_rows: int = 1
    max_pages: int = 1

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One per layer."""
        return self.windows or (None,) * self.num_layers


class AttentionBackend(ABC):
    """Causal attention over a paged KV cache. Per step: one `plan`, then per layer `write_kv` and `run`, in that order."""

    @abstractmethod
    def clear(self, blocks: Sequence[int]) -> None:
        """Makes all keys and values of these blocks zero."""

    @abstractmethod
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes block targets[i] hold the keys and values of block sources[i], in all layers, for each i. All are read
        before any is written; no block is in `targets` twice. Comes before `plan`."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Does all index work of a step, so that layers do none."""

    @abstractmethod
    def write_kv(self, layer: int, kv: torch.Tensor) -> None:
        """Stores this step's keys and values at the planned slots: [tokens, 2 * kv_heads, head_dim], the keys first."""

    @abstractmethod
    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of q [tokens, heads, head_dim] over each token's own sequence, in a layer with a sliding window over the
        last `window` tokens of it, itself included; [tokens, heads * head_dim]."""


class CapturableAttention(AttentionBackend):
    """One whose layers can be recorded once and replayed: what `plan_captured` changes, a recorded run reads anew.

    spare_block: a block of the cache that no sequence owns.
    """

    spare_block: int

    @abstractmethod
    def plan_captured(self, metadata: AttentionMetadata) -> None:
        """As `plan`, for sequences that all decode, into the same memory whenever there are as many of them."""
