"""Ranks with a GPU each: tensors meet over NCCL, the numbers of a step over gloo, whose waiting takes no GPU.

Not run in CI, which has no GPU; its tests are marked `gpu`.
"""

from typing import Any

import torch
from torch.distributed import AllreduceOptions, GatherOptions, PrefixStore, Store  # type: ignore[attr-defined]

from tllm_core.engines.tp.comm.gloo import FOREVER, GlooGroup
from tllm_core.errors import ConfigError


class NcclGroup(GlooGroup):
    """One rank's end. NCCL adds in an order of its own, in which all ranks get the same bits."""

    def __init__(self, store: Store, rank: int, size: int, host: str, device: torch.device) -> None:
        """Raises ConfigError where this torch has no NCCL."""
        super().__init__(store, rank, size, host)
        torch.cuda.set_device(device)
        self._nccl: Any = _nccl(PrefixStore("nccl", store), rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super().all_reduce(x)
        x = x.contiguous()
        self._fast().allreduce([x], AllreduceOptions()).wait()  # the stream waits, not this thread
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_cuda:
            return super().gather(x)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        self._fast().gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=1) if parts else None

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()  # whatever else it has waits for peers, which may be gone
        self._nccl = None
        super().close()

    def _fast(self) -> Any:
        if self._nccl is None:
            raise RuntimeError("the group of ranks is closed")
        return self._nccl


def _nccl(store: Store, rank: int, size: int) -> Any:
    try:
        from torch.distributed import ProcessGroupNCCL
    except ImportError:
        raise ConfigError(
            "this torch has no NCCL, over which ranks on GPUs meet; set device to 'cpu', or tensor_parallel_size to 1"
        ) from None
    options = ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    return ProcessGroupNCCL(store, rank, size, options)
