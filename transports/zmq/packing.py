"""A frame as zmq message parts.

A zmq part costs several microseconds on each side, far more than copying a few kilobytes. So a small frame is one part: a
table (number of buffers, their lengths) and the buffers. A large one is an empty part and then each buffer as it is.
"""

import functools
import struct
from collections.abc import Sequence
from typing import Any

from tllm_core.contracts.interfaces import Frame

PACKED_BYTES = 64 << 10
PACKED_BUFFERS = 255
TABLE_BYTES = 1 + 4 * PACKED_BUFFERS
"""What packing adds at most."""


@functools.cache
def _table(count: int) -> struct.Struct:
    return struct.Struct(f"<B{count}I")


def measure(frame: Frame) -> list[int]:
    """Bytes in each buffer; raises TypeError for an item that is no bytes or memoryview."""
    return [len(part) if type(part) is bytes else memoryview(part).nbytes for part in frame]


def pack(frame: Frame, sizes: Sequence[int]) -> list[Any]:
    """The message parts of a frame whose buffers have these sizes in bytes."""
    count = len(sizes)
    if count <= PACKED_BUFFERS and sum(sizes) <= PACKED_BYTES:
        return [b"".join((_table(count).pack(count, *sizes), *frame))]
    # A buffer that zmq refuses halfway through a message would leave the socket in the middle of it.
    return [b"", *(memoryview(part).cast("B") for part in frame)]


def unpack(raw: bytes) -> Frame:
    """The frame in a single part. What is no packed frame comes back as one buffer, for the lane to refuse."""
    if not raw:
        return [raw]
    table = _table(raw[0])
    if len(raw) < table.size:
        return [raw]
    _, *sizes = table.unpack_from(raw)
    if table.size + sum(sizes) != len(raw):
        return [raw]
    view, start, frame = memoryview(raw), table.size, []
    for size in sizes:
        frame.append(view[start : start + size])
        start += size
    return frame
