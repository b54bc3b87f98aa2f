"""Ranks of one host that meet in shared memory: ten times faster than sockets for what a decode step sums.

Every call is one meeting of all ranks, numbered from 1. A rank writes its part into the slot of that number's parity, then
raises its own counter to the number: that says that its part is there, and that it has read all of the meeting before. So a
slot may be written again once all counters have reached the number before, and nobody ever waits for more than one meeting.

Nothing here ends a wait for a peer that is gone or stands still: whoever watches the processes ends the world.
"""

from array import array
from collections.abc import Iterator
from itertools import product

import torch

from tllm_core.engines.tp.comm import Group
from tllm_core.engines.tp.comm.futex import wait, wake
from tllm_core.engines.tp.comm.segment import SLOT_BYTES, Segment
from tllm_core.engines.tp.comm.sums import add_in_order
from tllm_core.engines.tp.devices import usable_cores

_ROUND = 2**32
_SPINS = 100
"""Looks at a counter, of about 0.1 us, before a rank sleeps. Where each rank has a core, more are no faster; where two are put
on one, the other can't run meanwhile: 2000 made a sum ten times slower there."""
_PATIENCE_S = 1.0
"""How long it sleeps at most before it looks again; it is woken, and this is for signals alone."""
_MOST_VIEWS = 64


class ShmGroup(Group):
    """One rank's end. Tensors are on the CPU."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.rank, self.size = rank, segment.size
        self._number = 0
        self._spins = _SPINS if usable_cores() >= self.size else 0
        self._counters = list(segment.counters)
        self._others = [(other, counter) for other, counter in enumerate(self._counters) if other != rank]
        self._bytes = memoryview(segment.memory)
        self._starts = [[segment.slot(other, which) for other in range(self.size)] for which in (0, 1)]
        whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._slots = [[whole[start : start + SLOT_BYTES] for start in starts] for starts in self._starts]
        self._views: dict[tuple[torch.dtype, torch.Size], list[list[torch.Tensor]]] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In `x`; in a copy where it is not contiguous."""
        x = x.contiguous()
        if x.nbytes <= SLOT_BYTES:
            self._reduce(x)
        else:
            flat, room = x.view(-1), SLOT_BYTES // x.dtype.itemsize
            for start in range(0, len(flat), room):
                self._reduce(flat[start : start + room])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        rows, columns = x.shape
        whole = x.new_empty(rows, self.size, columns) if self.rank == 0 else None
        for chosen in _pieces(rows, columns, SLOT_BYTES // x.dtype.itemsize):
            part = x[chosen]
            views = self._meet(part)
            self._publish()
            if whole is not None:
                self._await_all(self._number)
                for other, view in enumerate(views):
                    whole[chosen[0], other, chosen[1]] = view
        return None if whole is None else whole.view(rows, self.size * columns)

    def broadcast(self, values: "array[int] | None") -> "array[int]":
        """Raises ValueError where rank 0 gives None, or another rank does not."""
        if (values is None) is (self.rank == 0):
            raise ValueError("rank 0 broadcasts its values, and the others wait for them with None")
        return self._receive() if values is None else self._send(values)

    def close(self) -> None:
        """Lets go of the memory, which is gone with the last rank that does."""
        self._bytes.release()
        self._views.clear()
        self._slots.clear()
        self._counters.clear()
        self._others.clear()

    # ------------------------------------------------------------------------------------------------ meetings

    def _reduce(self, x: torch.Tensor) -> None:
        views = self._meet(x)
        self._publish()
        self._await_all(self._number)
        add_in_order(views, x)

    def _meet(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Begins a meeting with `part` in this rank's slot. Returns what will be there of all ranks, in shape and type alike."""
        which = self._begin()
        key = (part.dtype, part.shape)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            views = self._views[key] = [
                [slot[: part.nbytes].view(part.dtype).view(part.shape) for slot in slots] for slots in self._slots
            ]
        views[which][self.rank].copy_(part)
        return views[which]

    def _begin(self) -> int:
        """Numbers a meeting, and waits until its slot may be written. Returns which slot that is."""
        before = self._number
        self._number = (before + 1) % _ROUND
        self._await_all(before)
        return self._number & 1

    def _publish(self) -> None:
        own = self._counters[self.rank]
        own.value = self._number
        wake(own)

    def _await_all(self, number: int) -> None:
        for other, _ in self._others:
            self._await(other, number)

    def _await(self, rank: int, number: int) -> None:
        """Until that rank's counter has reached `number`. Counters go round: none is ever half a round from another."""
        counter = self._counters[rank]
        for _ in range(self._spins):
            if (counter.value - number) % _ROUND < _ROUND // 2:
                return
        while ((seen := counter.value) - number) % _ROUND >= _ROUND // 2:
            wait(counter, seen, _PATIENCE_S)

    # ------------------------------------------------------------------------------------------------ broadcast

    def _send(self, values: "array[int]") -> "array[int]":
        """The first slot begins with how many numbers there are in all."""
        whole = array("i", (len(values),)) + values
        content = memoryview(whole).cast("B")
        for at in range(0, len(content), SLOT_BYTES):
            start = self._starts[self._begin()][0]
            piece = content[at : at + SLOT_BYTES]
            self._bytes[start : start + len(piece)] = piece
            self._publish()
        return values

    def _receive(self) -> "array[int]":
        start = self._take()
        received = array("i", bytes(self._bytes[start : start + 4]))
        left = 4 * received.pop()
        received.frombytes(self._bytes[start + 4 : start + min(4 + left, SLOT_BYTES)])
        left -= SLOT_BYTES - 4
        while left > 0:
            start = self._take()
            received.frombytes(self._bytes[start : start + min(left, SLOT_BYTES)])
            left -= SLOT_BYTES
        return received

    def _take(self) -> int:
        """Takes part in a meeting in which rank 0 alone speaks. Returns where its slot starts."""
        which = self._begin()
        self._publish()
        self._await(0, self._number)
        return self._starts[which][0]


def _pieces(rows: int, columns: int, room: int) -> Iterator[tuple[slice, slice]]:
    """Cuts a matrix into parts of at most `room` elements: whole rows where they fit."""
    width = min(columns, room)
    height = max(1, room // width)
    for row, column in product(range(0, rows, height), range(0, columns, width)):
        yield slice(row, row + height), slice(column, column + width)
