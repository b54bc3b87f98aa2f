"""What no engine can be faster than: a model's matrix products alone, and reading its weights and keys once per step."""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.plugins.bench.engine_contenders import Contender, synchronize

_READ_BYTES = 1 << 30


class Sizes(NamedTuple):
    """Of a Llama-like model: the shapes of a layer's products, fused, and of the last one; kv: what a token keeps in a layer."""

    layer: list[tuple[int, int]]
    num_layers: int
    head: tuple[int, int]
    kv: int

    @classmethod
    def of(cls, model_dir: str) -> "Sizes":
        config = json.loads((Path(model_dir) / "config.json").read_text())
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv = config.get("num_key_value_heads", heads) * head_dim
        layer = [(heads * head_dim + 2 * kv, hidden), (hidden, heads * head_dim), (2 * inner, hidden), (hidden, inner)]
        return cls(layer, config["num_hidden_layers"], (config["vocab_size"], hidden), 2 * kv)

    @property
    def weights(self) -> int:
        """How many there are."""
        rows, columns = self.head
        return self.num_layers * sum(a * b for a, b in self.layer) + rows * columns


class BandwidthLimit(Contender):
    """Every weight, and every key and value of the batch, read once per step as fast as the device copies memory."""

    name = "bandwidth_limit"

    def __init__(self, model_dir: str, dtype: str, device: str = "cpu") -> None:
        self._sizes, self._device = Sizes.of(model_dir), torch.device(device)
        self._itemsize: int = getattr(torch, dtype).itemsize

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        sizes, context = self._sizes, prompt_tokens + new_tokens // 2
        items = sizes.weights + batch * context * sizes.num_layers * sizes.kv
        return batch * self._bytes_per_s() / (items * self._itemsize)

    def prefill(self, tokens: int) -> float:
        """Far above what arithmetic allows."""
        return tokens * self._bytes_per_s() / (self._sizes.weights * self._itemsize)

    def _bytes_per_s(self) -> float:
        """Of a copy, which reads and writes; the best of several."""
        source = torch.ones(_READ_BYTES, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(5):
            synchronize(self._device)
            began = time.perf_counter()
            target.copy_(source)
            synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return 2 * _READ_BYTES / min(seconds)


class GemmLimit(Contender):
    """The model's matrix products alone, fused as an engine would: each with the fastest of torch's kernels for it."""

    name = "gemm_limit"

    def __init__(self, model_dir: str, dtype: str, device: str = "cpu") -> None:
        sizes, kind = Sizes.of(model_dir), getattr(torch, dtype)
        self._device = torch.device(device)
        self._layers = [
            [torch.randn(shape, dtype=kind, device=device) for shape in sizes.layer] for _ in range(sizes.num_layers)
        ]
        self._head = torch.randn(sizes.head, dtype=kind, device=device)

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        """Over as many steps as any contender takes: the best of single steps would be no limit that lasts."""
        return batch / self._seconds(batch, batch, steps=new_tokens)

    def prefill(self, tokens: int) -> float:
        return tokens / self._seconds(tokens, 1, steps=1)

    @torch.inference_mode()
    def _seconds(self, rows: int, logits_rows: int, steps: int) -> float:
        """Of one step, with the kernels that are the fastest for it."""
        kind, device = self._head.dtype, self._device
        inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=kind, device=device) for w in self._layers[0]}
        wanted = inputs[self._head.shape[1]][:logits_rows]
        seconds = []
        for pack in _packings(kind, device):
            layers, head = [[pack(w) for w in layer] for layer in self._layers], pack(self._head)

            def step(layers: list[list[Product]] = layers, head: Product = head) -> None:
                for layer, weights in zip(layers, self._layers, strict=True):
                    for product, weight in zip(layer, weights, strict=True):
                        product(inputs[weight.shape[1]])
                head(wanted)

            seconds.append(_mean_s(step, steps, device))
            del layers, head, step
            gc.collect()
        return min(seconds)


def _mean_s(step: Callable[[], None], steps: int, device: torch.device) -> float:
    step()  # what is allocated or chosen once
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / steps


Product = Callable[[torch.Tensor], torch.Tensor]


def _packings(dtype: torch.dtype, device: torch.device) -> list[Callable[[torch.Tensor], Product]]:
    """Ways to multiply by a weight: plain; packed by oneDNN in its own type; in float32, for CPUs without bfloat16."""
    ways: list[Callable[[torch.Tensor], Product]] = [lambda weight: lambda x: F.linear(x, weight)]
    if torch._C._has_mkldnn and device.type == "cpu":
        ways.append(lambda weight: _packed(weight.float()))
        if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            ways.append(_packed)
    return ways


def _packed(weight: torch.Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 512)
    kind = weight.dtype
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(kind), packed, None, "none", [], "")
