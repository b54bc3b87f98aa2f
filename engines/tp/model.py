"""The Llama family on flat batches: activations are [tokens, hidden], whatever sequences they belong to."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.attention import AttentionBackend
from tllm_core.engines.tp.config import ModelConfig
from tllm_core.engines.tp.linear import Linear, arithmetic_dtype
from tllm_core.engines.tp.ops import Norm, Ops, Rotation
from tllm_core.engines.tp.rope import rope_table
from tllm_core.engines.tp.weights import Checkpoint


class Layer:
    """One decoder layer: attention and a gated MLP, each added to the residual stream."""

    __slots__ = ("_config", "_ops", "attention_norm", "down", "gate_up", "index", "mlp_norm", "out", "qkv")

    def __init__(self, loader: "_Loader", index: int) -> None:
        config = loader.config
        prefix = f"model.layers.{index}."
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self._config, self._ops = config, loader.ops
        self.index = index
        self.attention_norm = loader.norm(prefix + "input_layernorm.weight")
        self.mlp_norm = loader.norm(prefix + "post_attention_layernorm.weight")
        self.qkv = loader.linear(
            [attention + "q_proj", attention + "k_proj", attention + "v_proj"],
            [q, kv, kv],
            hidden,
            config.attention_bias,
        )
        self.out = loader.linear([attention + "o_proj"], [hidden], q, config.attention_bias)
        self.gate_up = loader.linear([mlp + "gate_proj", mlp + "up_proj"], [inner, inner], hidden, config.mlp_bias)
        self.down = loader.linear([mlp + "down_proj"], [hidden], inner, config.mlp_bias)

    def parts(self) -> tuple[Linear | Norm, ...]:
        """All that holds weights."""
        return (self.attention_norm, self.mlp_norm, self.qkv, self.out, self.gate_up, self.down)

    def __call__(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        next_norm: Norm,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """normed: x [tokens, hidden] after this layer's norm; the same of what comes out, after the next layer's.

        Or only `rows` of it: keys and values are stored for all tokens either way.
        """
        config, ops = self._config, self._ops
        heads = self.qkv(normed).view(x.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        rotated = ops.rotate(heads[:, : -config.num_kv_heads], rotation)
        k, v = rotated[:, config.num_heads :], heads[:, -config.num_kv_heads :]
        attention.write_kv(self.index, k, v)
        mixed = attention.run(self.index, rotated[:, : config.num_heads])
        if rows is not None:
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        normed, x = self.mlp_norm.after(self.out, mixed, x)
        return next_norm.after(self.down, ops.silu_and_mul(self.gate_up(normed)), x)


class Llama:
    """A decoder with rotary positions, RMS norms, gated MLP and grouped-query attention."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        """Loads. `dtype` is what weights are rounded to; see `arithmetic_dtype` for what they are computed in.

        `progress` is given the share that is loaded. Raises ModelError as Checkpoint does.
        """
        loader = _Loader(config, checkpoint, ops, dtype, device)
        self.config, self._ops = config, ops
        self.dtype = loader.arithmetic
        self.embedding = loader.embedding()
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(Layer(loader, index))
            progress((index + 1) / (config.num_layers + 1))
        self.norm = loader.norm("model.norm.weight")
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = loader.linear([head], [config.vocab_size], config.hidden_size, False)
        self.rope = rope_table(config.rope, config.head_dim, max_positions).to(device)
        progress(1.0)

    def move_to(self, device: torch.device) -> None:
        """Puts all weights aside to, or back from, another device. On a CPU they are packed and stay."""
        self.embedding, self.rope = self.embedding.to(device), self.rope.to(device)
        for part in (self.norm, self.head, *(part for layer in self.layers for part in layer.parts())):
            part.move_to(device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """float32 logits [rows, vocab] of `logits_rows` (int32 indexes into the batch; None = all tokens).

        token_ids, positions: int32 [tokens]. `attention` was planned for this batch.
        """
        x = F.embedding(token_ids, self.embedding).to(self.dtype)
        rotation = self._ops.rotation(self.rope, positions, self.dtype)
        normed = self.layers[0].attention_norm(x)
        for layer, after in pairwise(self.layers):
            normed, x = layer(normed, x, rotation, attention, after.attention_norm)
        normed, _ = self.layers[-1](normed, x, rotation, attention, self.norm, logits_rows)
        return self.head(normed).float()


class _Loader:
    """Names, shapes and types of the weights, in one place."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.ops = config, ops
        self.arithmetic = arithmetic_dtype(dtype, device)
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device

    def norm(self, name: str) -> Norm:
        shapes = [[self.config.hidden_size]]
        weight = self._checkpoint.stacked([name], shapes, self._dtype, self.arithmetic).clone().to(self._device)
        return self.ops.norm(weight, self.config.rms_norm_eps)

    def linear(self, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        """One product for weights of equal input, stacked in the order of `names`."""
        weights, shapes = [f"{name}.weight" for name in names], [[r, columns] for r in rows]
        weight = self._checkpoint.stacked(weights, shapes, self._dtype, self.arithmetic).to(self._device)
        if not bias:
            return Linear(weight)
        biases = [f"{name}.bias" for name in names]
        return Linear(
            weight,
            self._checkpoint.stacked(biases, [[r] for r in rows], self._dtype, self.arithmetic).to(self._device),
        )

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden], in the narrower of the stored and the asked type: rows are widened as they are looked up."""
        name = "model.embed_tokens.weight"
        stored = self._checkpoint.dtype(name)
        dtype = stored if stored.itemsize < self._dtype.itemsize else self._dtype
        shape = [self.config.vocab_size, self.config.hidden_size]
        return self._checkpoint.tensor(name, shape, dtype).to(self._device)
