"""Which keys there are, and what may stand in them.

PREFIX:ENGINE:name                         who holds the name
PREFIX:ENGINE:GENERATION:hello             stream: frontends announce themselves; there for as long as the engine is
PREFIX:ENGINE:GENERATION:up:PEER           stream: frames of one frontend; there for as long as the frontend is
PREFIX:ENGINE:GENERATION:down:PEER         stream: frames to one frontend
PREFIX:ENGINE:GENERATION:nowhere           never there: what is written to it shows whether the server writes
"""

from __future__ import annotations

import re

from msgspec import Struct

from tllm_core.contracts.interfaces import PeerId
from tllm_core.errors import ConfigError
from tllm_core.transports.redis.settings import WORD

PEER = re.compile(rb"[0-9a-f]{32}")


def checked(what: str, word: str) -> str:
    """`word`, which may stand in a key. Raises ConfigError for anything but letters, digits, `_`, `-` and inner dots."""
    if WORD.fullmatch(word) is None:
        raise ConfigError(
            f"{what} {word[:80]!r} can't be used with redis: take up to 128 letters, digits, '_', '-' and "
            "single dots between them, with a letter or digit first"
        )
    return word


class Keys(Struct, frozen=True):
    """The keys of one engine generation."""

    prefix: str
    engine: str
    generation: int

    @classmethod
    def of(cls, prefix: str, engine: str, generation: int) -> Keys:
        """Raises ConfigError for names that can't stand in a key."""
        return cls(checked("the prefix", prefix), checked("the engine name", engine), generation)

    @property
    def name(self) -> bytes:
        return f"{self.prefix}:{self.engine}:name".encode()

    @property
    def root(self) -> bytes:
        """What all keys of this generation start with."""
        return f"{self.prefix}:{self.engine}:{self.generation:016x}:".encode()

    @property
    def hello(self) -> bytes:
        return self.root + b"hello"

    @property
    def nowhere(self) -> bytes:
        return self.root + b"nowhere"

    def up(self, peer: PeerId) -> bytes:
        return self.root + b"up:" + peer.hex().encode()

    def down(self, peer: PeerId) -> bytes:
        return self.root + b"down:" + peer.hex().encode()
