"""A frame as one block of bytes, for transports whose messages are one: a table (how many buffers, how long each), then them.

A count below 255 is one byte; beyond, the byte 255 and the count in four. All numbers are little-endian and unsigned.
"""

import functools
import struct
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Frame

SHORT_BUFFERS = 254
"""Buffers whose count fits in the first byte."""
_MANY = 255
_LONG_COUNT = struct.Struct("<BI")


@functools.cache
def _table(count: int) -> struct.Struct:
    return struct.Struct(f"<B{count}I")


def table_bytes(count: int) -> int:
    """What packing adds to a frame of so many buffers."""
    return 4 * count + (1 if count <= SHORT_BUFFERS else _LONG_COUNT.size)


def measure(frame: Frame) -> list[int]:
    """Bytes in each buffer; raises TypeError for an item that is no bytes or memoryview."""
    return [len(part) if type(part) is bytes else memoryview(part).nbytes for part in frame]


def pack(frame: Frame, sizes: Sequence[int]) -> bytes:
    """The frame whose buffers have these sizes in bytes."""
    count = len(sizes)
    if count <= SHORT_BUFFERS:
        return b"".join((_table(count).pack(count, *sizes), *frame))
    lengths = struct.pack(f"<{count}I", *sizes)
    return b"".join((_LONG_COUNT.pack(_MANY, count), lengths, *frame))


def unpack(raw: bytes) -> Frame:
    """The frame in a block. What is no packed frame comes back as one buffer, for the lane to refuse."""
    if not raw:
        return [raw]
    if raw[0] == _MANY:
        return _unpack_many(raw)
    table = _table(raw[0])
    if len(raw) < table.size:
        return [raw]
    _, *sizes = table.unpack_from(raw)
    return _cut(raw, table.size, sizes)


def _unpack_many(raw: bytes) -> Frame:
    if len(raw) < _LONG_COUNT.size:
        return [raw]
    _, count = _LONG_COUNT.unpack_from(raw)
    start = table_bytes(count)
    if count <= SHORT_BUFFERS or len(raw) < start:
        return [raw]
    return _cut(raw, start, struct.unpack_from(f"<{count}I", raw, _LONG_COUNT.size))


def _cut(raw: bytes, start: int, sizes: Sequence[int]) -> Frame:
    if start + sum(sizes) != len(raw):
        return [raw]
    view, frame = memoryview(raw), []
    for size in sizes:
        frame.append(view[start : start + size])
        start += size
    return frame
