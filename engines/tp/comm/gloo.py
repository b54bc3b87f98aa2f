"""Ranks that meet over sockets: on any CPU, and between hosts."""

from array import array
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import BroadcastOptions, GatherOptions, PrefixStore, Store  # type: ignore[attr-defined]

from tllm_core.engines.tp.comm import Group
from tllm_core.engines.tp.comm.sums import add_in_order

FOREVER = timedelta(days=3650)
"""An idle engine is no failure, and what is one is seen by whoever watches the processes."""

_FIRST = 1024
"""Numbers in the first message of a broadcast, which says how many there are: most fit into it."""


class GlooGroup(Group):
    """One rank's end. Tensors are on the CPU. A peer that is gone is a RuntimeError of what waits for it."""

    def __init__(self, store: Store, rank: int, size: int, host: str) -> None:
        """Returns when all have come. `host`: this host's address that the others can reach, 127.0.0.1 where they are here."""
        self.rank, self.size = rank, size
        self._store = store  # rank 0's process serves it, and others may still be reading
        gloo: Any = torch.distributed.ProcessGroupGloo  # of which its type knows little
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = FOREVER
        self._gloo: Any = gloo(PrefixStore("gloo", store), rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In `x`; in a copy where it is not contiguous. Gloo's own all_reduce adds in another order with each shape."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._open().allgather([parts], [x]).wait()
        add_in_order(parts, x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        self._open().gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=1) if parts else None

    def broadcast(self, values: "array[int] | None") -> "array[int]":
        """Raises ValueError where rank 0 gives None, or another rank does not."""
        if (values is None) is (self.rank == 0):
            raise ValueError("rank 0 broadcasts its values, and the others wait for them with None")
        first = array("i", bytes(4 * _FIRST))
        if values is not None:
            start = array("i", (len(values),)) + values[: _FIRST - 1]
            first[: len(start)] = start
        self._share(first)
        count = first[0]
        rest = array("i", bytes(4 * max(0, count - _FIRST + 1))) if values is None else values[_FIRST - 1 :]
        if rest:
            self._share(rest)
        return first[1 : count + 1] + rest if values is None else values

    def close(self) -> None:
        self._gloo = None

    def _share(self, numbers: "array[int]") -> None:
        """Rank 0's into all others', which are of the same length."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._open().broadcast([torch.frombuffer(numbers, dtype=torch.int32)], options).wait()

    def _open(self) -> Any:
        if self._gloo is None:
            raise RuntimeError("the group of ranks is closed")
        return self._gloo
