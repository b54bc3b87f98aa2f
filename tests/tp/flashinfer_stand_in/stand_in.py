"""The module itself: its functions, and how the wrappers are made."""

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from tests.tp.flashinfer_stand_in import kernels, rules
from tests.tp.flashinfer_stand_in.rules import demand
from tests.tp.flashinfer_stand_in.signatures import Signatures
from tests.tp.flashinfer_stand_in.tape import launch
from tests.tp.flashinfer_stand_in.wrappers import DecodeWrapper, PrefillWrapper

VERSIONS = ("0.6.13", "0.7.4")


class FlashInferStandIn:
    """`flashinfer` of that version. calls: how often each of its functions was called."""

    def __init__(self, version: str) -> None:
        self.__version__ = version
        self.calls: Counter[str] = Counter()
        self._signatures = Signatures(version)
        self.BatchDecodeWithPagedKVCacheWrapper = partial(DecodeWrapper, self._signatures)
        self.BatchPrefillWithPagedKVCacheWrapper = partial(PrefillWrapper, self._signatures)

    def _bind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], computed: str) -> dict[str, Any]:
        self.calls[name] += 1
        return self._signatures.bind(name, args, kwargs, set(computed.split()))

    def rmsnorm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._norm("rmsnorm", args, kwargs, 0.0)

    def gemma_rmsnorm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._norm("gemma_rmsnorm", args, kwargs, 1.0)

    def _norm(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], offset: float) -> torch.Tensor:
        a = self._bind(name, args, kwargs, "input weight eps")
        x, weight = a["input"], a["weight"]
        rules.is_half(input=x, weight=weight)
        rules.on_device(x.device, weight=weight)
        rules.dense_rows(input=x, weight=weight)
        demand(x.dim() in (2, 3), f"input has {x.dim()} dimensions, not 2 or 3")
        rules.has_shape("weight", weight, [x.shape[-1]])
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(lambda: out.copy_(kernels.rms_norm(x, weight.float() + offset, a["eps"])), x)
        return out

    def fused_add_rmsnorm(self, *args: Any, **kwargs: Any) -> None:
        self._add_norm("fused_add_rmsnorm", args, kwargs, 0.0)

    def gemma_fused_add_rmsnorm(self, *args: Any, **kwargs: Any) -> None:
        self._add_norm("gemma_fused_add_rmsnorm", args, kwargs, 1.0)

    def _add_norm(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], offset: float) -> None:
        a = self._bind(name, args, kwargs, "input residual weight eps")
        x, residual, weight = a["input"], a["residual"], a["weight"]
        rules.is_half(input=x, residual=residual, weight=weight)
        rules.on_device(x.device, residual=residual, weight=weight)
        rules.dense_rows(input=x, residual=residual, weight=weight)
        demand(x.dim() == 2, f"input has {x.dim()} dimensions, not 2")
        rules.has_shape("residual", residual, x.shape)
        rules.has_shape("weight", weight, [x.shape[1]])

        def body() -> None:
            # The kernel norms the sum before it is rounded.
            total = x.float() + residual.float()
            residual.copy_(total)
            x.copy_(kernels.rms_norm(total, weight.float() + offset, a["eps"]))

        launch(body, x)

    def silu_and_mul(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._gate("silu_and_mul", args, kwargs, F.silu)

    def gelu_tanh_and_mul(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._gate("gelu_tanh_and_mul", args, kwargs, partial(F.gelu, approximate="tanh"))

    def _gate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], act: Any) -> torch.Tensor:
        x = self._bind(name, args, kwargs, "input")["input"]
        rules.is_half(input=x)
        demand(x.is_contiguous(), "input is not contiguous")
        demand(x.shape[-1] * x.element_size() % 16 == 0, f"rows of {x.shape[-1]} are no multiple of 16 bytes")
        inner = x.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], inner, dtype=x.dtype, device=x.device)
        launch(lambda: out.copy_(act(x[..., :inner].float()) * x[..., inner:].float()), x)
        return out

    def apply_rope_with_cos_sin_cache_inplace(self, *args: Any, **kwargs: Any) -> None:
        name = "apply_rope_with_cos_sin_cache_inplace"
        a = self._bind(name, args, kwargs, "positions query key head_size cos_sin_cache is_neox")
        query, key, table, positions, size = (
            a[name] for name in ("query", "key", "cos_sin_cache", "positions", "head_size")
        )
        rules.is_half(query=query, key=key)
        rules.on_device(query.device, key=key, cos_sin_cache=table, positions=positions)
        rules.dense_rows(query=query, key=key)
        rules.is_int32(positions=positions)
        demand(table.dtype == torch.float32 and table.is_contiguous(), "cos_sin_cache is not contiguous float32")
        demand(a["is_neox"] is True, "the stand-in knows no interleaved rotation")
        demand(size in rules.HEAD_DIMS, f"there is no kernel for head_size {size}")
        demand(table.shape[1] <= size and table.shape[1] % 16 == 0, f"{table.shape[1]} of {size} can't be turned")
        rules.has_shape("positions", positions, [query.shape[0]])
        rules.has_shape("key", key, [query.shape[0], key.shape[1]])
        for x in (query, key):
            heads = x.view(x.shape[0], -1, size)
            launch(partial(_turn, heads, table, positions), query)

    def append_paged_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        computed = "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr"
        a = self._bind("append_paged_kv_cache", args, kwargs, computed + " kv_last_page_len kv_layout")
        key, value, (k, v) = a["append_key"], a["append_value"], a["paged_kv_cache"]
        places = {
            name: a[name] for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
        }
        rules.is_int32(**places)
        rules.on_device(key.device, append_value=value, keys=k, values=v, **places)
        demand(key.dim() == 3, f"append_key has {key.dim()} dimensions, not 3")
        rules.has_shape("append_value", value, key.shape)
        rules.dense_rows(append_key=key, append_value=value)
        demand(key.dtype == value.dtype == k.dtype, f"{key.dtype} is appended to a cache of {k.dtype}: not converted")
        demand(a["kv_layout"] == "NHD", f"the stand-in knows no layout {a['kv_layout']}")
        rules.pages(k, v, k.shape[1], key.shape[1], key.shape[2], k.dtype)
        rules.has_shape("batch_indices", places["batch_indices"], [key.shape[0]])
        rules.has_shape("positions", places["positions"], [key.shape[0]])
        rules.has_shape("kv_indptr", places["kv_indptr"], [len(places["kv_last_page_len"]) + 1])
        launch(partial(_append, key, value, k, v, places), key)

    def get_seq_lens(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        a = self._bind("get_seq_lens", args, kwargs, "kv_indptr kv_last_page_len page_size")
        pages = a["kv_indptr"][1:] - a["kv_indptr"][:-1]
        return torch.clamp(pages - 1, min=0) * a["page_size"] + a["kv_last_page_len"]


def _turn(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
    demand(int(positions.max()) < len(table), f"position {int(positions.max())} of a table of {len(table)}")
    heads.copy_(kernels.rotate(heads, table, positions))


def _append(
    key: torch.Tensor, value: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: dict[str, torch.Tensor]
) -> None:
    rows, positions = places["batch_indices"].tolist(), places["positions"].tolist()
    found = kernels.tables(places["kv_indptr"], places["kv_indices"])
    for row, position in zip(rows, positions, strict=True):
        demand(0 <= row < len(found), f"a token of sequence {row} of {len(found)}")
        length = (len(found[row]) - 1) * k.shape[1] + int(places["kv_last_page_len"][row])
        demand(0 <= position < length, f"position {position} of a sequence of {length}")
        page = found[row][position // k.shape[1]]
        demand(0 <= page < k.shape[0], f"page {page} of a cache of {k.shape[0]}")
    for cache, new in ((k, key), (v, value)):
        kernels.append(cache, new, rows, positions, found)
