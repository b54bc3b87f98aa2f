"""Memory that the ranks of one host share: a counter for each, and two slots for what it says.

It has no name, so that nothing is left of it however its ranks end: rank 0 makes it, and the others open it through
rank 0's entry in /proc.
"""

import ctypes
import mmap
import os
import secrets

from msgspec import Struct

SLOT_BYTES = 1 << 20
"""Small enough that a core writes and another reads it within their caches, and that no copy goes around these."""

_TOKEN_BYTES = 16
_LINE = 64
_HEAD_BYTES = 8192


class Place(Struct, frozen=True):
    """Where rank 0 has it open, and what stands at its start: another host's process may have the same number."""

    pid: int
    fd: int
    token: bytes

    def __str__(self) -> str:
        return f"{self.pid} {self.fd} {self.token.hex()}"

    @staticmethod
    def parse(text: str) -> "Place":
        pid, fd, token = text.split()
        return Place(int(pid), int(fd), bytes.fromhex(token))


class Segment:
    """`counters[rank]`, each in a cache line of its own, and the bytes from `slot(rank, which)` on, SLOT_BYTES of them."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(fd, _length(size))
        self.counters = [ctypes.c_uint32.from_buffer(self.memory, _LINE * (1 + rank)) for rank in range(size)]

    @property
    def token(self) -> bytes:
        return self.memory[:_TOKEN_BYTES]

    def slot(self, rank: int, which: int) -> int:
        """`which` is 0 or 1."""
        return _HEAD_BYTES + (2 * rank + which) * SLOT_BYTES


def create(size: int) -> tuple[Segment, Place]:
    """The caller closes `place.fd` once all have opened it. Raises OSError where the system has no memory for it."""
    fd = os.memfd_create("tllm-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _length(size))
        segment = Segment(fd, size)
    except BaseException:
        os.close(fd)
        raise
    segment.memory[:_TOKEN_BYTES] = token = secrets.token_bytes(_TOKEN_BYTES)
    return segment, Place(os.getpid(), fd, token)


def open_at(place: Place, size: int) -> Segment:
    """Raises OSError where it can't be reached from here: another host, or another container."""
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != _length(size):
            raise OSError(f"process {place.pid} is another one here: rank 0 is not on this host")
        segment = Segment(fd, size)
    finally:
        os.close(fd)
    if segment.token != place.token:
        raise OSError(f"process {place.pid} is another one here: rank 0 is not on this host")
    return segment


def _length(size: int) -> int:
    assert _LINE * (1 + size) <= _HEAD_BYTES
    return _HEAD_BYTES + 2 * size * SLOT_BYTES
