"""A frame as zmq message parts.

A zmq part costs several microseconds on each side, far more than copying a few kilobytes. So a small frame is one part, packed
as `core/contracts/packing.py` does. A large one is an empty part and then each buffer as it is.
"""

from collections.abc import Sequence
from typing import Any

from tllm_core.contracts import packing
from tllm_core.contracts.interfaces import Frame
from tllm_core.contracts.packing import SHORT_BUFFERS, measure, unpack

__all__ = ["TABLE_BYTES", "measure", "pack", "unpack"]

PACKED_BYTES = 64 << 10
TABLE_BYTES = packing.table_bytes(SHORT_BUFFERS)
"""What packing adds at most."""


def pack(frame: Frame, sizes: Sequence[int]) -> list[Any]:
    """The message parts of a frame whose buffers have these sizes in bytes."""
    if len(sizes) <= SHORT_BUFFERS and sum(sizes) <= PACKED_BYTES:
        return [packing.pack(frame, sizes)]
    # A buffer that zmq refuses halfway through a message would leave the socket in the middle of it.
    return [b"", *(memoryview(part).cast("B") for part in frame)]
