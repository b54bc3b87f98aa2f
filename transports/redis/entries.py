"""Stream entries: one per frame, a field per buffer; and their ids.

Field names: `f` a buffer of a frame, `0` a frame without buffers, `h` the first entry of a stream's writer, `e` its last.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Frame

BUFFER, EMPTY, HERE, END = b"f", b"0", b"h", b"e"

START = b"0-0"


def fields_of(frame: Frame) -> list[bytes]:
    """Field names and values, in turn. Raises TypeError for an item that is no bytes or memoryview."""
    fields: list[bytes] = []
    for part in frame:
        fields += (BUFFER, part if type(part) is bytes else bytes(memoryview(part)))
    return fields or [EMPTY, b""]


def frame_of(fields: Sequence[bytes]) -> Frame | None:
    """The frame of an entry, or None where it is none."""
    if fields[0] == BUFFER:
        return list(fields[1::2])
    return [] if fields[0] == EMPTY else None


def after(entry_id: bytes) -> bytes:
    """The smallest id behind this one."""
    number, _, part = entry_id.partition(b"-")
    return b"%d-%d" % (int(number), int(part) + 1)


class EntryIds:
    """Strictly rising ids of one writer, whatever becomes of the server.

    They begin with the time in microseconds, so that a later writer of the same stream goes on above them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(time.time_ns() // 1000)

    def next(self) -> bytes:
        with self._lock:
            return b"%d-1" % next(self._numbers)

    def skip(self, last: bytes) -> None:
        """Goes on above `last`."""
        with self._lock:
            number = max(next(self._numbers), int(last.partition(b"-")[0]) + 1)
            self._numbers = itertools.count(number)
