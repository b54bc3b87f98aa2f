"""What FlashInfer's kernels demand of their arguments."""

from collections.abc import Iterable
from itertools import pairwise

import torch

HALF = (torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128, 256)
DECODE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads per kv head that there is a decode kernel for without tensor cores."""
WORKSPACE_BYTES = 128 << 20


class Refused(ValueError):
    """A call that the real package refuses, or that would make its kernels read or write what they must not."""


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def on_device(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        demand(tensor.device == device, f"{name} is on {tensor.device}, not on {device}")


def on_host(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        demand(tensor.device.type == "cpu", f"{name} is on {tensor.device}: planning would wait for the device")


def is_int32(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        demand(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32")
        demand(tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions, not 1")
        demand(tensor.is_contiguous(), f"{name} is not contiguous")


def is_half(**tensors: torch.Tensor) -> None:
    kinds = {tensor.dtype for tensor in tensors.values()}
    demand(len(kinds) == 1, f"{', '.join(tensors)} are of different types: {kinds}")
    demand(kinds <= set(HALF), f"{', '.join(tensors)}: {kinds} is neither float16 nor bfloat16")


def dense_rows(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        demand(tensor.stride(-1) == 1, f"the last dimension of {name} is not contiguous")


def has_shape(name: str, tensor: torch.Tensor, shape: Iterable[int]) -> None:
    demand(tuple(tensor.shape) == tuple(shape), f"{name} has the shape {tuple(tensor.shape)}, not {tuple(shape)}")


def starts(name: str, indptr: torch.Tensor, rows: int, end: int) -> None:
    """`indptr` [rows + 1] rises from 0 to `end`."""
    has_shape(name, indptr, [rows + 1])
    values = indptr.tolist()
    demand(values[0] == 0 and values[-1] == end, f"{name} goes from {values[0]} to {values[-1]}, not from 0 to {end}")
    demand(all(a <= b for a, b in pairwise(values)), f"{name} falls: {values}")


def pages(k: torch.Tensor, v: torch.Tensor, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """A cache's two halves in NHD."""
    demand(k.shape == v.shape and k.stride() == v.stride(), "keys and values are laid out differently")
    demand(k.dim() == 4, f"a cache has 4 dimensions, not {k.dim()}")
    has_shape("the cache", k, [k.shape[0], page_size, kv_heads, head_dim])
    demand(k.dtype == v.dtype == dtype, f"the cache is {k.dtype}, and {dtype} was planned")
    dense_rows(keys=k, values=v)
