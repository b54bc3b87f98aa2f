"""What an attention backend is: the KV cache's owner, planned once per step and run once per layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tllm_core.engines.tp.attention.metadata import AttentionMetadata

__all__ = ["AttentionBackend", "AttentionMetadata"]


class AttentionBackend(ABC):
    """Causal attention over a paged KV cache. Per step: one `plan`, then per layer `write_kv` and `run`, in that order."""

    @abstractmethod
    def clear(self, blocks: Sequence[int]) -> None:
        """Makes all keys and values of these blocks zero."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Does all index work of a step, so that layers do none."""

    @abstractmethod
    def write_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores this step's keys and values, [tokens, kv_heads, head_dim] each, at the planned slots."""

    @abstractmethod
    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of q [tokens, heads, head_dim] over each token's own sequence, in a layer with a sliding window over the
        last `window` tokens of it, itself included; [tokens, heads * head_dim]."""
