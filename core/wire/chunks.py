"""Messages that are larger than a frame may be: cut on one side, put together on the other. Sans-IO.

A chunk is one piece of one buffer. MORE: the message goes on in the next frame; CUT: and so does this buffer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tllm_core.wire.codec import MalformedFrame
from tllm_core.wire.header import CUT, MAX_BUFFERS, MORE, size_of


def chunks(payload: Sequence[Any], size: int) -> Iterator[tuple[memoryview, int]]:
    """The pieces of a payload, `size` bytes at most, each with its flags; nothing is copied."""
    for number, buffer in enumerate(payload, 1):
        view = memoryview(buffer).cast("B")
        flags = MORE if number < len(payload) else 0
        last = max(0, view.nbytes - 1) // size * size
        for start in range(0, last, size):
            yield view[start : start + size], MORE | CUT
        yield view[last:], flags


class Assembly:
    """The one message of a lane that is being put together; `max_bytes` of it at most."""

    __slots__ = ("_buffers", "_kind", "_max_bytes", "_pieces", "_size")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kind: int | None = None
        self._buffers: list[Any] = []
        self._pieces: list[Any] = []
        self._size = 0

    @property
    def is_begun(self) -> bool:
        return self._kind is not None

    def add(self, kind: int, flags: int, payload: Sequence[Any]) -> list[Any] | None:
        """Takes the next frame of the lane: the whole payload, or None while more is to come.

        Raises MalformedFrame for what no sender makes, and forgets what was there of the message.
        """
        try:
            self._check(kind, flags, payload)
        except MalformedFrame:
            self._clear()
            raise
        self._kind = kind
        self._pieces.append(payload[0])
        self._size += size_of(payload[0])
        if not flags & CUT:
            self._buffers.append(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))
            self._pieces = []
        if flags & MORE:
            return None
        whole = self._buffers
        self._clear()
        return whole

    def _check(self, kind: int, flags: int, payload: Sequence[Any]) -> None:
        if len(payload) != 1 or flags == CUT or (self._kind is not None and kind != self._kind):
            raise MalformedFrame("chunks that make no message")
        if len(self._buffers) >= MAX_BUFFERS or self._size + size_of(payload[0]) > self._max_bytes:
            raise MalformedFrame(f"a message in chunks of more than {self._max_bytes} bytes (max_message_bytes)")

    def _clear(self) -> None:
        self._kind, self._buffers, self._pieces, self._size = None, [], [], 0
