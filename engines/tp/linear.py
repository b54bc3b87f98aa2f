"""Matrix products with weights, whole or a rank's part of them: packed once for the CPU's kernels, plain elsewhere.

Why packed: with few rows (decoding) torch's own float32 product reaches half of what memory allows and its bfloat16 one,
on CPUs without bfloat16 arithmetic, computes row by row. oneDNN with weights in its own order is at the limit for both.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tllm_core.engines.tp.comm import Group
from tllm_core.engines.tp.invariant import in_blocks

_ACTIVATIONS: dict[str, tuple[str, list[float], str]] = {"silu": ("swish", [], ""), "gelu_tanh": ("gelu", [], "tanh")}
"""What oneDNN calls them: name, numbers, variant."""

_EXPECTED_ROWS = 512
"""Rows that oneDNN packs for; measured as good as smaller guesses at 1 to 512 rows."""


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512_BF16, AMX, or Arm's BF16)."""
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    return torch.backends.cpu.get_cpu_capability().startswith("SVE") and _onednn_bfloat16()


def arithmetic_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What activations, products and the KV cache use where weights are `dtype`.

    On a CPU without bfloat16 (or any float16) arithmetic it is float32: the weights are rounded to `dtype`, and nothing is
    rounded after them. That is at least as exact as the asked type and several times faster than emulating it.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    return torch.bfloat16 if dtype == torch.bfloat16 and has_native_bfloat16() else torch.float32


def _onednn_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _onednn_bfloat16())


class Linear:
    """`x @ weight.T + bias` for x [rows, in_features]; weight [out_features, in_features], bias [out_features] or None.

    Takes the weight over: where it is packed, the plain one is not kept. in_blocks: see `invariant`.
    """

    __slots__ = ("bias", "in_blocks", "packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.in_blocks = False
        self.packed = _packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS) if self.packed else weight
        self.bias = bias

    def move_to(self, device: torch.device) -> None:
        """Only for weights that were not packed; they are kept as they are."""
        if not self.packed:
            self.weight = self.weight.to(device)
            self.bias = None if self.bias is None else self.bias.to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out_features]."""
        return in_blocks(self._product, x) if self.in_blocks else self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [rows, out_features] plus the product, in one kernel where that exists."""
        if self.in_blocks:
            return residual + in_blocks(self._product, x)
        if self.packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return y
        return residual + F.linear(x, self.weight, self.bias)


class Gated(Linear):
    """`act(x @ gate.T) * (x @ up.T)`, the wide half of a gated MLP. weight: [2 * inner, in_features], the gate first.

    Packed, the first product activates and the second multiplies, each in its own kernel; elsewhere, and where `activation` is
    None, `act_and_mul` does both, from [rows, 2 * inner] to [rows, inner].
    """

    __slots__ = ("_act_and_mul", "_activation", "_up")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        act_and_mul: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._act_and_mul = act_and_mul
        self._up: Linear | None = None
        if activation is not None and _packs(weight):
            self._activation = _ACTIVATIONS[activation]
            (weight, up), (bias, up_bias) = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
            self._up = Linear(up, up_bias)
        super().__init__(weight, bias)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inner]."""
        if self._up is None:
            return self._act_and_mul(super()._product(x))
        gate = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, *self._activation)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._up.weight, self._up.bias, "mul")
        return y


class RowParallel(Linear):
    """A product whose weight's columns are spread over ranks, as its input is: every rank ends with the whole sum.

    Only one rank is given the bias.
    """

    __slots__ = ("_group",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: Group) -> None:
        super().__init__(weight, bias)
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, this rank's part of in_features]; [rows, out_features]."""
        return self._group.all_reduce(super().__call__(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As Linear's; of several ranks' the sum is made first, so that it is rounded as it would be on one."""
        return super().add_to(residual, x) if self._group.size == 1 else residual + self(x)
