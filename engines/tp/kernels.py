"""Which library computes attention and the small kernels: decided here, once per start, and nowhere else."""

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from tllm_core.engines.tp.attention import AttentionBackend, AttentionShape, CapturableAttention
from tllm_core.engines.tp.attention.flashinfer import WORKSPACE_BYTES, WRAPPER_BYTES, FlashInferAttention
from tllm_core.engines.tp.attention.invariant import InvariantAttention
from tllm_core.engines.tp.attention.torch import TorchAttention
from tllm_core.engines.tp.graphs import CudaRecorder, DecodeGraphs, Forward, Recorder, graph_sizes, warm_up
from tllm_core.engines.tp.invariant import InvariantOps
from tllm_core.engines.tp.ops import Ops
from tllm_core.engines.tp.ops.flashinfer import FlashInferOps
from tllm_core.engines.tp.ops.torch import TorchOps
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError

_LOG = logging.getLogger(__name__)
_OLDEST, _TOO_NEW = (0, 6, 13), (0, 8)
_HEAD_DIMS = (64, 128, 256)
_INSTALL = "pip install 'tllm-core[flashinfer]'"

Progress = Callable[[float], None]


class Kernels(ABC):
    """One library's kernels. ops: those between matrix products and attention. kv_dtype: of the cache, None = the model's."""

    name: str
    ops: Ops
    kv_dtype: torch.dtype | None = None

    @abstractmethod
    def attention(self, shape: AttentionShape) -> AttentionBackend:
        """Takes the cache's memory; raises RuntimeError or MemoryError where there is none."""

    def reserved_bytes(self, windows: int) -> int:
        """What they take of a device's memory beside weights and cache, for layers of so many different windows."""
        return 0

    def prepare(
        self, forward: Forward, attention: AttentionBackend, shape: AttentionShape, vocab_size: int, progress: Progress
    ) -> DecodeGraphs | None:
        """Does now what would make the first steps slow; returns recorded decoding steps, if any. Once per model and cache."""
        return None


class TorchKernels(Kernels):
    """Any device and type. batch_invariant: see `invariant`."""

    name = "torch"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.ops = InvariantOps(TorchOps()) if batch_invariant else TorchOps()
        self._attention = InvariantAttention if batch_invariant else TorchAttention

    def attention(self, shape: AttentionShape) -> AttentionBackend:
        return self._attention(shape)


class FlashInferKernels(Kernels):
    """flashinfer: the package, or what behaves like it. recorder: makes what records decoding steps, None = none is recorded."""

    name = "flashinfer"

    def __init__(
        self,
        flashinfer: Any,
        settings: TpSettings,
        recorder: Callable[[torch.device], Recorder] | None = CudaRecorder,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.ops = FlashInferOps(flashinfer)
        self._flashinfer, self._settings = flashinfer, settings
        self._recorder = recorder if settings.cuda_graphs else None
        self._batch_invariant = batch_invariant
        if settings.kv_dtype != "auto":
            self.kv_dtype = getattr(torch, settings.kv_dtype)

    def attention(self, shape: AttentionShape) -> AttentionBackend:
        settings = self._settings
        return FlashInferAttention(
            self._flashinfer,
            shape,
            kv_dtype=self.kv_dtype,
            kv_scales=(settings.k_scale, settings.v_scale),
            kernels=settings.attention_kernels,
            batch_invariant=self._batch_invariant,
        )

    def reserved_bytes(self, windows: int) -> int:
        captured = 0 if self._recorder is None else len(graph_sizes(self._settings.max_num_seqs))
        return WORKSPACE_BYTES + windows * (2 + captured) * WRAPPER_BYTES

    def prepare(
        self, forward: Forward, attention: AttentionBackend, shape: AttentionShape, vocab_size: int, progress: Progress
    ) -> DecodeGraphs | None:
        assert isinstance(attention, CapturableAttention)
        progress(0.0)
        # FlashInfer compiles its kernels when they are first used, which takes up to minutes.
        warm_up(forward, attention, shape)
        if self._recorder is None:
            return None
        graphs = DecodeGraphs(forward, attention, self._recorder(shape.device), shape, vocab_size)
        graphs.capture(progress)
        return graphs


def choose(settings: TpSettings, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """FlashInfer on a GPU that it knows, for models that it has kernels for; else torch.

    Raises ConfigError, which says why, where a library is asked for that can't be used here.
    """
    if settings.attention == "torch":
        return _torch(settings)
    flashinfer: Any = None
    obstacle = _obstacle(device, dtype, head_dim)
    if obstacle is None:
        flashinfer, obstacle = _import()
    if obstacle is None:
        return FlashInferKernels(flashinfer, settings, batch_invariant=settings.batch_invariant)
    if settings.attention == "flashinfer":
        raise ConfigError(f"attention 'flashinfer' can't be used: {obstacle}")
    if device.type == "cuda":
        _LOG.warning("attention is computed by torch, which is slower: %s", obstacle)
    return _torch(settings)


def _torch(settings: TpSettings) -> Kernels:
    if settings.kv_dtype != "auto":
        raise ConfigError(f"kv_dtype {settings.kv_dtype!r} needs attention 'flashinfer', on a GPU; leave it out")
    return TorchKernels(batch_invariant=settings.batch_invariant)


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cuda":
        return f"it needs a GPU, and the device is {device.type!r}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in bfloat16 and float16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return f"it has kernels for heads of {_HEAD_DIMS}, and the model's have {head_dim}"
    least = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if (has := torch.cuda.get_device_capability(device)) < least:
        return f"{str(dtype).removeprefix('torch.')} needs compute capability {least}, and the GPU has {has}"
    return None


def _import() -> tuple[Any, str | None]:
    """The package, or why it can't be used."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        return None, f"it can't be imported ({error}); {_INSTALL}"
    found = tuple(int(part) for part in flashinfer.__version__.split(".")[:3] if part.isdecimal())
    if not _OLDEST <= found < _TOO_NEW:
        return None, f"it is version {flashinfer.__version__}, and 0.6.13 to below 0.8 is supported; {_INSTALL}"
    return flashinfer, None
