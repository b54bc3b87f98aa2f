"""The decoder of all families, on flat batches: activations are [tokens, hidden], whatever sequences they belong to."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.attention import AttentionBackend
from tllm_core.engines.tp.linear import Linear, RowParallel
from tllm_core.engines.tp.models.loader import Loader
from tllm_core.engines.tp.ops import Norm, Rotation
from tllm_core.engines.tp.rope import rope_table


class Layer:
    """One decoder layer: attention and a gated MLP, each added to the residual stream; this rank's part of both."""

    __slots__ = (
        "_heads", "_ops", "_queries", "_rope", "attention_norm", "down", "gate_up", "index", "k_norm",
        "mlp_norm", "out", "post_attention_norm", "post_mlp_norm", "q_norm", "qkv",
    )  # fmt: skip

    def __init__(self, loader: Loader, index: int) -> None:
        config, names, hidden = loader.config, loader.config.names, loader.config.hidden_size
        prefix = f"{names.layer}.{index}."

        def norm(name: str | None, size: int = hidden) -> Norm | None:
            return None if name is None else loader.norm(prefix + name, size)

        self.index = index
        self._ops = loader.ops
        self._queries = loader.shard.heads.num_queries
        self._heads = (self._queries + 2 * loader.shard.heads.num_kv, config.head_dim)
        self._rope = int(config.local_rope is not None and config.windows[index] is not None)
        self.attention_norm = loader.norm(prefix + names.attention_norm, hidden)
        self.post_attention_norm = norm(names.post_attention_norm)
        self.mlp_norm = loader.norm(prefix + names.mlp_norm, hidden)
        self.post_mlp_norm = norm(names.post_mlp_norm)
        self.q_norm, self.k_norm = norm(names.q_norm, config.head_dim), norm(names.k_norm, config.head_dim)
        self.qkv = loader.qkv(prefix)
        self.out = loader.out(prefix)
        self.gate_up = loader.gate_up(prefix)
        self.down = loader.down(prefix)

    def parts(self) -> list[Linear | Norm]:
        """All that holds weights."""
        norms = (self.post_attention_norm, self.post_mlp_norm, self.q_norm, self.k_norm)
        return [
            self.attention_norm, self.mlp_norm, self.qkv, self.out, self.gate_up, self.down,
            *(norm for norm in norms if norm is not None),
        ]  # fmt: skip

    def __call__(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        rotations: list[Rotation],
        attention: AttentionBackend,
        following: Norm,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x normalised by this layer's first norm, x), [tokens, hidden] each -> the same of its end, by the next one's.

        rows: the only tokens that are wanted; keys and values are stored for all of them either way.
        """
        mixed = self._attend(normed, rotations[self._rope], attention)
        if rows is not None:
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        normed, x = _add(self.out, self.post_attention_norm, self.mlp_norm, mixed, x)
        return _add(self.down, self.post_mlp_norm, following, self.gate_up(normed), x)

    def _attend(self, normed: torch.Tensor, rotation: Rotation, attention: AttentionBackend) -> torch.Tensor:
        """[tokens, this rank's query heads * head_dim]."""
        queries = self._queries
        heads = self.qkv(normed).view(normed.shape[0], *self._heads)
        values = (self._heads[0] + queries) // 2
        if self.q_norm is not None and self.k_norm is not None:
            heads[:, :queries] = self.q_norm(heads[:, :queries])
            heads[:, queries:values] = self.k_norm(heads[:, queries:values])
        self._ops.rotate(heads[:, :values], rotation)
        attention.write_kv(self.index, heads[:, queries:])
        return attention.run(self.index, heads[:, :queries])


def _add(
    product: RowParallel, own: Norm | None, following: Norm, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum) of `residual` and the product, which is normalised itself first where it has a norm."""
    if own is None:
        return following.after(product, x, residual)
    return following.add(own(product(x)), residual)


class Decoder:
    """A decoder with rotary positions, RMS norms, gated MLPs and grouped-query attention: one rank's part of it."""

    def __init__(
        self, loader: Loader, max_positions: int, progress: Callable[[float], None] = lambda done: None
    ) -> None:
        """Loads; `progress` is given the share that is loaded. Raises ModelError as Checkpoint does."""
        config, device = loader.config, loader.device
        self.config, self.shard = config, loader.shard
        self.dtype = loader.arithmetic
        self._group, self._ops = loader.group, loader.ops
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(Layer(loader, index))
            progress((index + 1) / (config.num_layers + 1))
        self.norm = loader.norm(config.names.norm, config.hidden_size)
        self.head = loader.head()
        shared = config.tie_word_embeddings and not self.head.packed and self.head.weight.dtype == loader.dtype
        self._embedding = None if shared else loader.embedding()
        # Rounded as the weights are: what the model was trained with.
        self._scale = torch.tensor(config.embedding_scale, dtype=loader.dtype).item()
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.ropes = [rope_table(rope, config.head_dim, max_positions).to(device) for rope in ropes]
        progress(1.0)

    def move_to(self, device: torch.device) -> None:
        """Puts all weights aside to, or back from, another device. On a CPU they are packed and stay."""
        self._embedding = None if self._embedding is None else self._embedding.to(device)
        self.ropes = [rope.to(device) for rope in self.ropes]
        for part in (self.norm, self.head, *(part for layer in self.layers for part in layer.parts())):
            part.move_to(device)

    def compute_in_blocks(self) -> None:
        """From now on every product gets blocks of the same number of rows; see `invariant`."""
        for part in (self.head, *(part for layer in self.layers for part in layer.parts())):
            if isinstance(part, Linear):
                part.in_blocks = True

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor | None:
        """float32 logits [rows, vocab] of `logits_rows` (int32 indexes into the batch; None = all tokens) on rank 0.

        token_ids, positions: int32 [tokens], the same on all ranks. `attention` was planned for this batch.
        """
        x = self._embed(token_ids)
        rotations = [self._ops.rotation(table, positions, self.dtype) for table in self.ropes]
        normed = self.layers[0].attention_norm(x)
        for layer, after in pairwise(self.layers):
            normed, x = layer(normed, x, rotations, attention, after.attention_norm)
        normed, _ = self.layers[-1](normed, x, rotations, attention, self.norm, logits_rows)
        return self._logits(normed)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]. Of several ranks each looks up the tokens that it has, and zeros for all others."""
        table = self.head.weight if self._embedding is None else self._embedding
        if self._group.size == 1:
            x = F.embedding(token_ids, table).to(self.dtype)
        else:
            own = token_ids - self.shard.vocab.start
            elsewhere = (own < 0) | (own >= len(self.shard.vocab))
            x = F.embedding(own.masked_fill_(elsewhere, 0), table).to(self.dtype)
            x = self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))
        return x if self._scale == 1.0 else x.mul_(self._scale)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor | None:
        gathered = self._group.gather(self.head(normed))
        if gathered is None:
            return None
        logits = gathered[:, : self.config.vocab_size].float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
