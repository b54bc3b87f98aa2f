"""The two attention wrappers: planned for a step, then run once per layer."""

from typing import Any

import torch

from tests.tp.flashinfer_stand_in import kernels, rules
from tests.tp.flashinfer_stand_in.rules import Refused, demand
from tests.tp.flashinfer_stand_in.signatures import Signatures
from tests.tp.flashinfer_stand_in.tape import launch, recording

_PLANNED = {"num_qo_heads", "num_kv_heads", "page_size", "window_left", "q_data_type", "kv_data_type", "sm_scale"}
_PLANNED |= {"disable_split_kv"}


class Wrapper:
    """What both have in common. `_plan`: the arguments of the last plan, None before the first."""

    name: str
    head_dim: str

    def __init__(self, signatures: Signatures, args: tuple[Any, ...], kwargs: dict[str, Any], known: set[str]) -> None:
        self._signatures = signatures
        made = signatures.bind(
            f"{self.name}.__init__", args, kwargs, known | {"float_workspace_buffer", "kv_layout", "backend"}
        )
        workspace: torch.Tensor = made["float_workspace_buffer"]
        demand(workspace.dtype == torch.uint8, f"the workspace is {workspace.dtype}, not uint8")
        demand(workspace.numel() >= rules.WORKSPACE_BYTES, f"the workspace has only {workspace.numel()} bytes")
        demand(workspace.is_meta or workspace.data_ptr() % 16 == 0, "the workspace is not aligned")
        demand(workspace.is_meta or not workspace[:4096].any(), "the workspace was not zeroed")
        demand(made["kv_layout"] == "NHD", f"the stand-in knows no layout {made['kv_layout']}")
        demand(made["backend"] in ("auto", "fa2", "fa3"), f"there is no backend {made['backend']!r}")
        self._made, self._device = made, workspace.device
        self._plan: dict[str, Any] | None = None

    def _check_plan(self, plan: dict[str, Any]) -> None:
        demand(not recording(), "a plan can't be recorded")
        heads, kv_heads = plan["num_qo_heads"], plan["num_kv_heads"]
        demand(heads % kv_heads == 0, f"{heads} heads share {kv_heads} kv heads")
        demand(plan[self.head_dim] in rules.HEAD_DIMS, f"there is no kernel for head_dim {plan[self.head_dim]}")
        demand(plan["page_size"] >= 1, "page_size is below 1")
        demand(plan["window_left"] >= -1, f"window_left is {plan['window_left']}")
        demand(plan["q_data_type"] in rules.HALF, f"queries of {plan['q_data_type']}: neither float16 nor bfloat16")
        plan["kv_data_type"] = plan["kv_data_type"] or plan["q_data_type"]
        narrow = plan["kv_data_type"] in rules.FLOAT8
        demand(narrow or plan["kv_data_type"] == plan["q_data_type"], f"a cache of {plan['kv_data_type']}")
        demand(not (narrow and self._made["backend"] == "fa3"), "fa3 reads a float8 cache with float8 queries only")
        if plan["sm_scale"] is None:
            plan["sm_scale"] = plan[self.head_dim] ** -0.5

    def _check_pages(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
        rules.is_int32(indptr=indptr, indices=indices, last_page_len=last)
        rules.on_host(indptr=indptr, last_page_len=last)
        rules.on_device(self._device, indices=indices)
        rules.starts("indptr", indptr, len(last), len(indices))
        demand(all(1 <= rows <= page_size for rows in last.tolist()), f"last_page_len is {last.tolist()}")
        demand(bool((indptr.diff() > 0).all()), "a sequence has no page")

    def _attend(
        self, q: torch.Tensor, cache: Any, out: torch.Tensor, scales: tuple[float, float], qo_indptr: torch.Tensor
    ) -> None:
        """Checks against the plan, then computes from the wrapper's buffers as they are when the kernel runs."""
        plan = self._plan
        assert plan is not None
        heads, head_dim = plan["num_qo_heads"], plan[self.head_dim]
        rules.has_shape("q", q, [q.shape[0], heads, head_dim])
        rules.has_shape("out", out, q.shape)
        demand(q.dtype == plan["q_data_type"], f"q is {q.dtype}, and {plan['q_data_type']} was planned")
        demand(out.dtype == q.dtype and out.is_contiguous(), "out has another type than q, or is not contiguous")
        rules.dense_rows(q=q)
        demand(isinstance(cache, tuple), "a cache is a pair of keys and values")
        k, v = cache
        rules.pages(k, v, plan["page_size"], plan["num_kv_heads"], head_dim, plan["kv_data_type"])
        rules.on_device(self._device, q=q, out=out, keys=k, values=v)
        scale, window, size = plan["sm_scale"] * scales[0], plan["window_left"], plan["page_size"]
        indptr, indices, last = self._indptr, self._indices, self._last

        def body() -> None:
            starts = qo_indptr.tolist()
            for i, table in enumerate(kernels.tables(indptr, indices)):
                demand(all(0 <= page < k.shape[0] for page in table), f"pages {table} of a cache of {k.shape[0]}")
                length = (len(table) - 1) * size + int(last[i])
                own = slice(starts[i], starts[i + 1])
                demand(own.stop - own.start <= length, f"{own.stop - own.start} queries over {length} keys")
                keys, values = (kernels.gathered(x, table, length) for x in (k, v))
                out[own] = (kernels.attend(q[own], keys, values, scale, window) * scales[1]).to(out.dtype)

        launch(body, q)

    _indptr: torch.Tensor
    _indices: torch.Tensor
    _last: torch.Tensor


class DecodeWrapper(Wrapper):
    name, head_dim = "BatchDecodeWithPagedKVCacheWrapper", "head_dim"
    _BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

    def __init__(self, signatures: Signatures, *args: Any, **kwargs: Any) -> None:
        super().__init__(signatures, args, kwargs, {"use_cuda_graph", "use_tensor_cores", *self._BUFFERS})
        self._graph: bool = self._made["use_cuda_graph"]
        buffers = [self._made[name] for name in self._BUFFERS]
        demand(self._graph == all(b is not None for b in buffers), "buffers are for graphs, and graphs need buffers")
        if self._graph:
            rules.is_int32(**dict(zip(self._BUFFERS, buffers, strict=True)))
            rules.on_device(self._device, **dict(zip(self._BUFFERS, buffers, strict=True)))
            self._indptr, self._indices, self._last = buffers
            rules.has_shape("paged_kv_indptr_buffer", self._indptr, [len(self._last) + 1])

    def plan(self, *args: Any, **kwargs: Any) -> None:
        # From 0.7 on `plan` takes anything and hands it on.
        names = (f"{self.name}._plan_impl", f"{self.name}.plan")
        name = next(name for name in names if self._signatures.has(name))
        known = _PLANNED | {"indptr", "indices", "last_page_len", "head_dim"}
        plan = self._signatures.bind(name, args, kwargs, known)
        self._check_plan(plan)
        indptr, indices, last = plan["indptr"], plan["indices"], plan["last_page_len"]
        self._check_pages(indptr, indices, last, plan["page_size"])
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        cores = self._made["use_tensor_cores"]
        demand(cores or group in rules.DECODE_GROUPS, f"{group} heads per kv head need tensor cores")
        if self._graph:
            self._fill(indptr, indices, last, plan)
        else:
            self._indptr, self._last = indptr.to(self._device), last.to(self._device)
            self._indices = indices
        self._plan = plan

    def _fill(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, plan: dict[str, Any]) -> None:
        """A replay reads the buffers, which keep their place and size."""
        demand(len(last) == len(self._last), f"{len(last)} sequences for a graph of {len(self._last)}")
        demand(len(indices) <= len(self._indices), f"{len(indices)} pages for a buffer of {len(self._indices)}")
        for name in (*_PLANNED, "head_dim"):
            frozen = self._plan is None or self._plan[name] == plan[name]
            demand(frozen, f"{name} changed, and is part of what was recorded")
        self._indptr.copy_(indptr)
        self._indices[: len(indices)].copy_(indices)
        self._last.copy_(last)

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        a = self._signatures.bind(
            f"{self.name}.run", args, kwargs, {"q", "paged_kv_cache", "out", "k_scale", "v_scale"}
        )
        if self._plan is None:
            raise Refused("run before plan")
        q, batch = a["q"], len(self._last)
        demand(q.shape[0] == batch, f"{q.shape[0]} queries for {batch} sequences")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if a["out"] is None else a["out"]
        rows = torch.arange(batch + 1)
        self._attend(q, a["paged_kv_cache"], out, (a["k_scale"] or 1.0, a["v_scale"] or 1.0), rows)
        return out


class PrefillWrapper(Wrapper):
    name, head_dim = "BatchPrefillWithPagedKVCacheWrapper", "head_dim_qk"

    def __init__(self, signatures: Signatures, *args: Any, **kwargs: Any) -> None:
        super().__init__(signatures, args, kwargs, set())

    def plan(self, *args: Any, **kwargs: Any) -> None:
        places = {"qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"}
        plan = self._signatures.bind(f"{self.name}.plan", args, kwargs, _PLANNED | places | {"head_dim_qk", "causal"})
        self._check_plan(plan)
        demand(plan["causal"] is True, "a prompt's attention is causal, and that is not the default")
        qo_indptr, last = plan["qo_indptr"], plan["paged_kv_last_page_len"]
        indptr, indices = plan["paged_kv_indptr"], plan["paged_kv_indices"]
        rules.is_int32(qo_indptr=qo_indptr)
        rules.on_host(qo_indptr=qo_indptr)
        rules.starts("qo_indptr", qo_indptr, len(last), int(qo_indptr[-1]))
        self._check_pages(indptr, indices, last, plan["page_size"])
        self._qo_indptr = qo_indptr.clone()
        self._indptr, self._indices, self._last = indptr.to(self._device), indices, last.to(self._device)
        self._plan = plan

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        a = self._signatures.bind(
            f"{self.name}.run", args, kwargs, {"q", "paged_kv_cache", "out", "k_scale", "v_scale"}
        )
        if self._plan is None:
            raise Refused("run before plan")
        q, tokens = a["q"], int(self._qo_indptr[-1])
        demand(q.shape[0] == tokens, f"{q.shape[0]} queries, and {tokens} were planned")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if a["out"] is None else a["out"]
        self._attend(q, a["paged_kv_cache"], out, (a["k_scale"] or 1.0, a["v_scale"] or 1.0), self._qo_indptr)
        return out
