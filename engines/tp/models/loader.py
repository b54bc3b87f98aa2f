"""From a checkpoint to the parts of a decoder: names, shapes and types of the weights, and which of them are this rank's."""

import torch

from tllm_core.engines.tp.comm import Group
from tllm_core.engines.tp.config import ModelConfig
from tllm_core.engines.tp.linear import Gated, Linear, RowParallel, arithmetic_dtype
from tllm_core.engines.tp.models.shard import shard_of
from tllm_core.engines.tp.ops import Norm, Ops
from tllm_core.engines.tp.weights import Checkpoint, Piece


class Loader:
    """Reads what one rank computes with. `dtype` is what weights are rounded to, `arithmetic` what they are held and computed
    in; see `arithmetic_dtype`.

    Its methods raise ModelError as Checkpoint does.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        group: Group,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ConfigError where the model can't be spread over that many ranks."""
        self.config, self.group, self.ops, self.dtype, self.device = config, group, ops, dtype, device
        self.arithmetic = arithmetic_dtype(dtype, device)
        self.shard = shard_of(config, group.rank, group.size)
        self._checkpoint = checkpoint

    def norm(self, name: str, size: int) -> Norm:
        weight = self._checkpoint.tensor(f"{name}.weight", [size], self.dtype).to(self.arithmetic)
        return self.ops.norm(weight.to(self.device), self.config.rms_norm_eps, offset=self.config.norm_offset)

    def qkv(self, prefix: str) -> Linear:
        """Queries, keys and values of this rank's heads, in that order."""
        config, heads, dim = self.config, self.shard.heads, self.config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        names, sizes = config.names.qkv, (q, kv, kv)
        pieces = []
        for part in range(3):
            name, first, rows = _stored(names, sizes, part)
            for place, queries in zip(heads.kv, heads.queries, strict=True):
                own = queries if part == 0 else range(0 if place is None else place, 0 if place is None else place + 1)
                room = heads.group if part == 0 else 1
                start, stop = first + own.start * dim, first + own.stop * dim
                pieces.append(Piece(prefix + name, (rows,), start, stop, room * dim))
        return Linear(*self._rows(pieces, config.hidden_size, config.qkv_bias))

    def gate_up(self, prefix: str) -> Gated:
        """The MLP's gate and up of this rank's columns."""
        config, inner = self.config, self.shard.inner
        pieces = []
        for part in range(2):
            name, first, rows = _stored(config.names.gate_up, (config.intermediate_size,) * 2, part)
            pieces.append(Piece(prefix + name, (rows,), first + inner.start, first + inner.stop, len(inner)))
        act_and_mul = self.ops.silu_and_mul if config.activation == "silu" else self.ops.gelu_tanh_and_mul
        activation = config.activation if self.ops.fuses_activations else None
        return Gated(*self._rows(pieces, config.hidden_size, config.mlp_bias), activation, act_and_mul)

    def out(self, prefix: str) -> RowParallel:
        """From this rank's heads back to the residual stream."""
        config, heads, dim = self.config, self.shard.heads, self.config.head_dim
        name, shape = prefix + config.names.out, (config.hidden_size, config.num_heads * dim)
        pieces = [Piece(name, shape, own.start * dim, own.stop * dim, heads.group * dim) for own in heads.queries]
        return self._columns(pieces, config.out_bias)

    def down(self, prefix: str) -> RowParallel:
        """From this rank's columns of the MLP back to the residual stream."""
        config, inner = self.config, self.shard.inner
        shape = (config.hidden_size, config.intermediate_size)
        pieces = [Piece(prefix + config.names.down, shape, inner.start, inner.stop, len(inner))]
        return self._columns(pieces, config.mlp_bias)

    def head(self) -> Linear:
        """To the logits of this rank's part of the vocabulary."""
        names = self.config.names
        name = names.embedding if self.config.tie_word_embeddings else names.head
        return Linear(*self._rows([self._vocab(name)], self.config.hidden_size, False))

    def embedding(self) -> torch.Tensor:
        """[vocab_rows, hidden], in the narrower of the stored and the asked type: rows are widened as they are looked up."""
        piece = self._vocab(self.config.names.embedding)
        stored = self._checkpoint.dtype(f"{piece.name}.weight")
        dtype = stored if stored.itemsize < self.dtype.itemsize else self.dtype
        return self._read([piece], (self.config.hidden_size,), 0, dtype, dtype).clone().to(self.device)

    def _vocab(self, name: str) -> Piece:
        vocab = self.shard.vocab
        return Piece(name, (self.config.vocab_size,), vocab.start, vocab.stop, self.shard.vocab_rows)

    def _rows(self, pieces: list[Piece], columns: int, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pieces of a weight [rows, columns], and of its bias [rows]."""
        weight = self._weight(pieces, (columns,), 0)
        if not with_bias:
            return weight, None
        biases = [piece._replace(name=f"{piece.name}.bias") for piece in pieces]
        bias = self._checkpoint.joined(biases, 0, self.dtype, self.arithmetic)
        return weight, bias.clone().to(self.device)

    def _columns(self, pieces: list[Piece], with_bias: bool) -> RowParallel:
        """Pieces of a weight [rows, columns] along its columns. The sum over ranks has the bias of rank 0."""
        weight, bias = self._weight(pieces, (), 1), None
        if with_bias and self.shard.rank == 0:
            name, (rows, _) = pieces[0].name, pieces[0].shape
            bias = self._checkpoint.tensor(f"{name}.bias", [rows], self.dtype).to(self.arithmetic).to(self.device)
        return RowParallel(weight, bias, self.group)

    def _weight(self, pieces: list[Piece], columns: tuple[int, ...], axis: int) -> torch.Tensor:
        return self._read(pieces, columns, axis, self.dtype, self.arithmetic).to(self.device)

    def _read(
        self, pieces: list[Piece], columns: tuple[int, ...], axis: int, stored: torch.dtype, dtype: torch.dtype
    ) -> torch.Tensor:
        named = [piece._replace(name=f"{piece.name}.weight", shape=piece.shape + columns) for piece in pieces]
        return self._checkpoint.joined(named, axis, stored, dtype)


def _stored(names: tuple[str, ...], sizes: tuple[int, ...], part: int) -> tuple[str, int, int]:
    """Where part number `part` is: the tensor, its first row there, and how many rows that tensor has of all parts."""
    if len(names) == 1:
        return names[0], sum(sizes[:part]), sum(sizes)
    return names[part], 0, sizes[part]
