"""The header and the MAC of every frame.

The first 16 bytes are frozen for ever, and so is the whole layout of Hello and Refuse, so that peers of any version can
refuse each other in words:

    0  magic "TLLM"    4  wire version u16    6  kind u8    7  flags u8    8  generation u64
    16 session u64     24 sequence u64        32 cumulative ack u64        40 HMAC-SHA256 over all of the frame

Integers are little-endian. A frame is [header, payload buffer, ...]. The MAC covers the 40 bytes, the number and the length
of each payload buffer, and the buffers, so that boundaries can't be moved. Its key is derived from (shared key, generation,
session, direction); handshake frames use session 0. Nothing here raises because of what arrived.
"""

import hmac
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tllm_core.contracts.interfaces import Frame

WIRE_VERSION: Final = 1
MIN_WIRE_VERSION: Final = 1

MAGIC: Final = b"TLLM"
LAYOUT: Final = struct.Struct("<4sHBBQQQQ")
OPEN_SIZE: Final = LAYOUT.size
MAC_SIZE: Final = 32
SEALED_SIZE: Final = OPEN_SIZE + MAC_SIZE
MAX_BUFFERS: Final = 1024

HELLO, WELCOME, REFUSE, GONE, ACK, MESSAGE, STEP, BEAT = range(1, 9)
"""Kinds. ACK carries nothing but the header; MESSAGE and STEP alone are sequenced; BEAT has a number of its own."""

DOWN: Final = 0x01
"""Flag: from the engine to a frontend."""
GAP: Final = 0x02
"""Flag: what followed the acknowledged frame is missing; send it again."""
MORE: Final = 0x04
"""Flag: the next frame continues this message."""
CUT: Final = 0x08
"""Flag, with MORE: and begins in the middle of this frame's buffer."""

_KNOWN_FLAGS: Final = DOWN | GAP | MORE | CUT
_ANY_VERSION: Final = frozenset({HELLO, REFUSE})
_JOINED_BYTES: Final = 1 << 16
_ONE_LENGTH: Final = struct.Struct("<QQ")
_NO_LENGTH: Final = bytes(8)
_PURPOSE: Final = b"tllm-core lane key"


class Header(NamedTuple):
    """What a frame says of itself; to be believed only once its MAC was checked."""

    magic: bytes
    version: int
    kind: int
    flags: int
    generation: int
    session: int
    sequence: int
    ack: int


def size_of(buffer: Any) -> int:
    """Bytes in one buffer of a frame."""
    return buffer.nbytes if type(buffer) is memoryview else len(buffer)


def payload_size(payload: Sequence[Any]) -> int:
    """Bytes in all buffers of a payload."""
    return size_of(payload[0]) if len(payload) == 1 else sum(map(size_of, payload))


class Seal:
    """Makes and checks the frames of one direction of one session. `key` None: by reference, without MAC. Any thread."""

    __slots__ = ("_flags", "_generation", "_mac", "_session")

    def __init__(self, key: bytes | None, generation: int, session: int, *, down: bool) -> None:
        self._generation, self._session = generation, session
        self._flags = DOWN if down else 0
        # A keyed HMAC that is copied costs half of what hmac.digest() does, which derives its two inner states each time.
        self._mac = None if key is None else hmac.new(derive_key(key, generation, session, self._flags), None, "sha256")

    def frame(
        self, kind: int, payload: Sequence[Any] = (), *, sequence: int = 0, ack: int = 0, flags: int = 0
    ) -> list[Any]:
        """A whole frame, ready for a port."""
        head = LAYOUT.pack(
            MAGIC, WIRE_VERSION, kind, self._flags | flags, self._generation, self._session, sequence, ack
        )
        if self._mac is not None:
            head += self._digest(head, payload)
        return [head, *payload]

    def is_genuine(self, frame: Frame) -> bool:
        """Whether the frame was made with this seal's key and is whole. Its header must have been read before."""
        if self._mac is None:
            return True
        head = frame[0]
        return hmac.compare_digest(self._digest(head[:OPEN_SIZE], frame[1:]), head[OPEN_SIZE:])

    def _digest(self, head: bytes, payload: Sequence[Any]) -> bytes:
        assert self._mac is not None
        mac = self._mac.copy()
        count = len(payload)
        if count == 0:
            mac.update(b"".join((head, _NO_LENGTH)))
        elif count == 1:
            (body,) = payload
            size = size_of(body)
            if size <= _JOINED_BYTES:
                mac.update(b"".join((head, _ONE_LENGTH.pack(1, size), body)))
            else:
                mac.update(b"".join((head, _ONE_LENGTH.pack(1, size))))
                mac.update(body)
        else:
            mac.update(b"".join((head, struct.pack(f"<{count + 1}Q", count, *map(size_of, payload)))))
            for body in payload:
                mac.update(body)
        return mac.digest()


def derive_key(key: bytes, generation: int, session: int, direction: int) -> bytes:
    """The key of one direction of one session: 32 bytes."""
    return hmac.digest(key, _PURPOSE + struct.pack("<QQB", generation, session, direction), "sha256")


class Gate:
    """Reads headers and turns away what can't be meant for this end, counted by reason; before any MAC is computed.

    generation: this engine's. down: whether this end is a frontend's. sealed: whether frames carry a MAC.
    """

    __slots__ = ("_counters", "_direction", "_generation", "_head_size", "_max_bytes", "_sealed")

    def __init__(self, generation: int, *, down: bool, sealed: bool, max_bytes: int, counters: Counter[str]) -> None:
        self._generation, self._direction, self._sealed = generation, DOWN if down else 0, sealed
        self._head_size = SEALED_SIZE if sealed else OPEN_SIZE
        self._max_bytes = max_bytes
        self._counters = counters

    def read(self, frame: Frame) -> Header | None:
        """The header, or None for a frame that was dropped and counted."""
        if not frame or size_of(frame[0]) != self._head_size:
            self._counters["truncated"] += 1
            return None
        header = Header._make(LAYOUT.unpack_from(frame[0]))
        reason = self._objection(header, frame)
        if reason is None:
            return header
        self._counters[reason] += 1
        return None

    def _objection(self, header: Header, frame: Frame) -> str | None:
        magic, version, kind, flags, generation, _, _, _ = header
        if magic != MAGIC:
            return "wrong_magic"
        if version != WIRE_VERSION and kind not in _ANY_VERSION:
            return "wrong_version"
        if generation != self._generation:
            return "wrong_generation"
        if flags & DOWN != self._direction:
            return "wrong_direction"
        if flags & ~_KNOWN_FLAGS or not HELLO <= kind <= BEAT:
            return "unknown_kind"
        if self._sealed and len(frame) > 1 and (len(frame) > MAX_BUFFERS or payload_size(frame[1:]) > self._max_bytes):
            return "oversized"
        return None
