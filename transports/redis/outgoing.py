"""What waits to be written: one queue per stream, each with its own bound, so that a slow reader holds nobody else up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tllm_core.contracts.interfaces import Frame
from tllm_core.transports.redis.entries import fields_of

BATCH_ENTRIES = 256
BATCH_BYTES = 1 << 20


class Stream:
    """One stream that this port writes. `length`: entries that its reader has not removed, as last heard.

    `made`: it exists. `gone`: its reader left, and nothing is to be written any more.
    """

    __slots__ = ("gone", "key", "length", "made", "queue", "size")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.queue: deque[list[bytes]] = deque()
        self.size = 0
        self.length = 0
        self.made = self.gone = False

    def add(self, fields: list[bytes], size: int) -> None:
        self.queue.append(fields)
        self.size += size

    def take(self) -> tuple[list[bytes], int]:
        fields = self.queue.popleft()
        size = sum(map(len, fields[1::2]))
        self.size -= size
        return fields, size

    def clear(self) -> None:
        self.queue.clear()
        self.size = 0


class Entry:
    """An entry on its way. `tried`: it was sent before, and no answer came."""

    __slots__ = ("fields", "id", "stream", "tried")

    def __init__(self, stream: Stream, entry_id: bytes, fields: list[bytes]) -> None:
        self.stream, self.id, self.fields = stream, entry_id, fields
        self.tried = False

    def command(self) -> tuple[bytes | str, ...]:
        """A stream that should be there must not be made anew in silence: what was in it is lost."""
        if self.stream.made:
            return ("XADD", self.stream.key, "NOMKSTREAM", self.id, *self.fields)
        return ("XADD", self.stream.key, self.id, *self.fields)


def measured(frame: Frame) -> tuple[list[bytes], int]:
    """The fields of a frame, and its size in bytes."""
    fields = fields_of(frame)
    return fields, sum(map(len, fields[1::2]))


def due(streams: Iterable[Stream], limit: int) -> list[tuple[Stream, list[bytes]]]:
    """The next entries to write, in turn of their streams, as far as their readers keep up with `limit` entries."""
    batch: list[tuple[Stream, list[bytes]]] = []
    total = 0
    for stream in streams:
        room = limit - stream.length
        while stream.queue and room > 0 and len(batch) < BATCH_ENTRIES and total < BATCH_BYTES:
            fields, size = stream.take()
            batch.append((stream, fields))
            room, total = room - 1, total + size
    return batch
