"""Attention by FlashInfer's kernels on a GPU, for bfloat16 and float16.

A step is planned once per distinct sliding window: the sequences that decode by one wrapper, the chunks of prompts by another.
Layers then only append their keys and values and run. The module comes as an argument: FlashInfer is imported in one
place (`kernels.py`), and tests hand in another that checks every call.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from tllm_core.engines.tp.attention import AttentionShape, CapturableAttention
from tllm_core.engines.tp.attention.metadata import AttentionMetadata

Kernels: TypeAlias = Literal["auto", "fa2", "fa3"]

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the partial results of split sequences; shared, since wrappers run one after another."""
WRAPPER_BYTES = 8 << 20
"""What every wrapper takes on the device by itself."""

_TENSOR_CORE_GROUP = 4
"""From so many query heads per kv head on, decoding on tensor cores is faster; below, its other kernel knows 1, 2 and 3."""
_LAYOUT = "NHD"


class _Indices(NamedTuple):
    """Of `AttentionMetadata` what kernels read, on the device."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor


class _Step(NamedTuple):
    """decode, prefill: the wrapper of each window, planned; empty where nothing of that kind is in the step."""

    on_device: _Indices
    num_decodes: int
    decode: Mapping[int | None, Any]
    prefill: Mapping[int | None, Any]


class FlashInferAttention(CapturableAttention):
    """`cache`: [layers, 2, num_blocks + 1, block_size, kv_heads, head_dim]; the last block belongs to nobody: the rows that
    fill up a captured batch write there.

    flashinfer: the package, or what behaves like it. kv_dtype: of the cache, None = dtype; a float8 one holds keys and values
    divided by `kv_scales` (of keys, of values). kernels: of prompts; decoding always takes fa2, whose plans graphs can
    replay. batch_invariant: every token, of prompts too, is computed as if it decoded alone and in one piece, so that its
    attention has the same bits in whatever batch and chunk; long prompts become slow.
    """

    def __init__(
        self,
        flashinfer: Any,
        shape: AttentionShape,
        *,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        kernels: Kernels = "auto",
        batch_invariant: bool = False,
    ) -> None:
        self._flashinfer = flashinfer
        self.spare_block = shape.num_blocks
        self._dtype, self._kv_dtype, self._kv_scales = shape.dtype, kv_dtype or shape.dtype, kv_scales
        blocks = (shape.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = torch.zeros((shape.num_layers, 2, *blocks), dtype=self._kv_dtype, device=shape.device)
        self._layers = [(layer[0], layer[1]) for layer in self.cache]
        self._windows = shape.layer_windows
        self._kernels, self._invariant = kernels, batch_invariant
        self._fixed: dict[str, Any] = {
            "num_qo_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "page_size": shape.block_size,
            "q_data_type": shape.dtype,
            "kv_data_type": self._kv_dtype,
            "sm_scale": shape.scale,
        }
        self._head_dim = shape.head_dim
        self._tensor_cores = batch_invariant or shape.num_heads // shape.num_kv_heads >= _TENSOR_CORE_GROUP
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._decode: dict[int | None, Any] = {}
        self._prefill: dict[int | None, Any] = {}
        self._captured: dict[int, _Step] = {}
        self._max_rows, self._max_pages = shape.max_rows, shape.max_pages
        self._buffers: _Indices | None = None
        self._step: _Step | None = None

    def clear(self, blocks: Sequence[int]) -> None:
        # As bytes: not every operation knows float8.
        places = torch.tensor(blocks, dtype=torch.int64, device=self.cache.device)
        self.cache.view(torch.uint8).index_fill_(2, places, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read, written = torch.tensor([sources, targets], dtype=torch.int64, device=self.cache.device)
        cache = self.cache.view(torch.uint8)
        cache.index_copy_(2, written, cache.index_select(2, read))

    # -------------------------------------------------------------------------------------------------- plan

    def plan(self, metadata: AttentionMetadata) -> None:
        if self._invariant:
            metadata = metadata.unrolled()
        decodes, prefills = metadata.num_decodes, metadata.num_sequences - metadata.num_decodes
        step = _Step(
            _Indices(
                *self._upload(
                    metadata.batch_indices,
                    metadata.positions,
                    metadata.kv_indices,
                    metadata.kv_indptr,
                    metadata.last_page_len,
                )
            ),
            num_decodes=decodes,
            decode={window: self._decoder(window) for window in set(self._windows)} if decodes else {},
            prefill={window: self._prefiller(window) for window in set(self._windows)} if prefills else {},
        )
        self._plan_decodes(step, metadata)
        self._plan_prefills(step, metadata)
        self._step = step

    def plan_captured(self, metadata: AttentionMetadata) -> None:
        step = self._captured.get(metadata.num_sequences)
        if step is None:
            step = self._captured[metadata.num_sequences] = self._capturable(metadata.num_sequences)
        step.on_device.positions.copy_(metadata.positions)
        self._plan_decodes(step, metadata, self._upload(metadata.kv_indices)[0])
        self._step = step

    def _plan_decodes(self, step: _Step, metadata: AttentionMetadata, indices: torch.Tensor | None = None) -> None:
        """indices: the pages where the step's own buffer is still to be filled, by the wrapper."""
        rows = step.num_decodes
        for window, wrapper in step.decode.items():
            wrapper.plan(
                indptr=metadata.kv_indptr[: rows + 1],
                indices=step.on_device.kv_indices[: int(metadata.kv_indptr[rows])] if indices is None else indices,
                last_page_len=metadata.last_page_len[:rows],
                head_dim=self._head_dim,
                window_left=_window_left(window),
                disable_split_kv=self._invariant,
                **self._fixed,
            )

    def _plan_prefills(self, step: _Step, metadata: AttentionMetadata) -> None:
        rows = step.num_decodes
        for window, wrapper in step.prefill.items():
            wrapper.plan(
                qo_indptr=metadata.qo_indptr[rows:] - metadata.qo_indptr[rows],
                paged_kv_indptr=metadata.kv_indptr[rows:] - metadata.kv_indptr[rows],
                paged_kv_indices=step.on_device.kv_indices[int(metadata.kv_indptr[rows]) :],
                paged_kv_last_page_len=metadata.last_page_len[rows:],
                head_dim_qk=self._head_dim,
                causal=True,
                window_left=_window_left(window),
                **self._fixed,
            )

    def _upload(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """In one copy."""
        whole = torch.cat(tensors).to(self.cache.device, non_blocking=True)
        return whole.split_with_sizes([tensor.shape[0] for tensor in tensors])

    # ---------------------------------------------------------------------------------------------- wrappers

    def _decoder(self, window: int | None) -> Any:
        """Its staging memory is used again by the next plan: a step must have ended before, which its tokens tell."""
        if window not in self._decode:
            self._decode[window] = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, kv_layout=_LAYOUT, use_tensor_cores=self._tensor_cores, backend="fa2"
            )
        return self._decode[window]

    def _prefiller(self, window: int | None) -> Any:
        if window not in self._prefill:
            self._prefill[window] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, kv_layout=_LAYOUT, backend=self._kernels
            )
        return self._prefill[window]

    def _capturable(self, rows: int) -> _Step:
        """Wrappers for exactly so many sequences, over memory that stays where it is; all sizes share it."""
        if self._buffers is None:
            self._buffers = self._make_buffers()
        whole = self._buffers
        mine = _Indices(
            batch_indices=whole.batch_indices[:rows],
            positions=whole.positions[:rows],
            kv_indices=whole.kv_indices[: rows * self._max_pages],
            kv_indptr=whole.kv_indptr[: rows + 1],
            last_page_len=whole.last_page_len[:rows],
        )
        wrappers = {
            window: self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                kv_layout=_LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=mine.kv_indptr,
                paged_kv_indices_buffer=mine.kv_indices,
                paged_kv_last_page_len_buffer=mine.last_page_len,
                backend="fa2",
            )
            for window in set(self._windows)
        }
        return _Step(mine, num_decodes=rows, decode=wrappers, prefill={})

    def _make_buffers(self) -> _Indices:
        rows, device = self._max_rows, self.cache.device
        return _Indices(
            batch_indices=torch.arange(rows, dtype=torch.int32, device=device),
            positions=torch.zeros(rows, dtype=torch.int32, device=device),
            kv_indices=torch.zeros(rows * self._max_pages, dtype=torch.int32, device=device),
            kv_indptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            last_page_len=torch.ones(rows, dtype=torch.int32, device=device),
        )

    # ------------------------------------------------------------------------------------------------ layers

    def write_kv(self, layer: int, kv: torch.Tensor) -> None:
        indices = self._planned().on_device
        k, v = kv.chunk(2, dim=1)
        if self._kv_dtype != self._dtype:
            k, v = (_narrowed(x, by, self._kv_dtype) for x, by in zip((k, v), self._kv_scales, strict=True))
        self._flashinfer.append_paged_kv_cache(
            append_key=k,
            append_value=v,
            batch_indices=indices.batch_indices,
            positions=indices.positions,
            paged_kv_cache=self._layers[layer],
            kv_indices=indices.kv_indices,
            kv_indptr=indices.kv_indptr,
            kv_last_page_len=indices.last_page_len,
            kv_layout=_LAYOUT,
        )

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        step, window = self._planned(), self._windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows = step.num_decodes
        if step.decode:
            self._run(step.decode[window], layer, q[:rows], out[:rows])
        if step.prefill:
            self._run(step.prefill[window], layer, q[rows:], out[rows:])
        return out.flatten(1)

    def _run(self, wrapper: Any, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        scales = {}
        if self._kv_dtype != self._dtype:
            scales = dict(zip(("k_scale", "v_scale"), self._kv_scales, strict=True))
        wrapper.run(q, self._layers[layer], out=out, **scales)

    def _planned(self) -> _Step:
        if self._step is None:
            raise RuntimeError("attention was not planned for this step")
        return self._step


def _window_left(window: int | None) -> int:
    """FlashInfer counts the tokens before a token's own."""
    return -1 if window is None else window - 1


def _narrowed(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    # What float8 can't hold would become NaN.
    most = torch.finfo(dtype).max
    return (x / scale).clamp(-most, most).to(dtype)
