"""What all sessions of one link have in common, and how a message becomes what a lane takes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from tllm_core.contracts.messages import (
    Abort,
    DownMessage,
    Gone,
    Goodbye,
    Hello,
    Obituary,
    Refuse,
    Stop,
    Stopping,
    UpMessage,
    Welcome,
)
from tllm_core.errors import FrameTooLarge
from tllm_core.wire.codec import MalformedFrame, decode_special, encode
from tllm_core.wire.header import GONE, HELLO, MESSAGE, REFUSE, WELCOME, Gate, Seal, payload_size
from tllm_core.wire.settings import WireSettings

Snapshot: TypeAlias = tuple[int, tuple[Any, ...], int, bool]
"""Frame kind, payload, size in bytes, and whether a full backlog takes it."""

HANDSHAKE_BYTES: Final = 1 << 20
"""Room for what is no message of a lane, such as Welcome with its EngineInfo."""
REFERENCE_BYTES: Final = 64
"""What a message that travels by reference counts in windows and backlogs."""
URGENT: Final = frozenset({Abort, Goodbye, Stop, Stopping, Obituary})
"""Taken by a lane whose backlog is full: they end things."""


class Terms:
    """What all sessions of one link have in common.

    key: None = by reference, without codec and MAC. max_bytes: one message at most. room: bytes of payload in one frame of the
    port, None = no limit; asked anew for each session. beat_s: how often this end beats; 0 = never.
    """

    def __init__(
        self,
        *,
        key: bytes | None,
        generation: int,
        settings: WireSettings,
        counters: Counter[str],
        reliable: bool = True,
        room: Callable[[], int | None] = lambda: None,
        beat_s: float = 0.0,
    ) -> None:
        self.key, self.generation = key, generation
        self.settings, self.counters = settings, counters
        self.reliable, self.beat_s = reliable, beat_s
        self.max_bytes = settings.max_message_bytes
        self.room = room

    def gate(self, *, down: bool) -> Gate:
        return Gate(
            self.generation,
            down=down,
            sealed=self.key is not None,
            max_bytes=max(self.settings.max_message_bytes, HANDSHAKE_BYTES),
            counters=self.counters,
        )

    def seal(self, session: int, *, down: bool) -> Seal:
        return Seal(self.key, self.generation, session, down=down)

    def snapshot(self, message: UpMessage | DownMessage) -> Snapshot:
        """An immutable copy of a message, ready for any lane. Raises FrameTooLarge."""
        if self.key is None:
            return MESSAGE, (message,), REFERENCE_BYTES, type(message) in URGENT
        kind, payload = encode(message)
        size = payload_size(payload)
        if size > self.max_bytes:
            raise FrameTooLarge(
                f"a {type(message).__name__} of {size} bytes is over the limit of {self.max_bytes} (max_message_bytes)"
            )
        return kind, payload, size, type(message) in URGENT

    def special(self, message: Hello | Welcome | Refuse | Gone) -> tuple[int, tuple[Any, ...]]:
        if self.key is None:
            return _KINDS[type(message)], (message,)
        return encode(message)

    def open_special(self, kind: int, payload: Sequence[Any]) -> Any:
        """A handshake message or a beat. Raises MalformedFrame."""
        if self.key is not None:
            return decode_special(kind, payload)
        if len(payload) != 1:
            raise MalformedFrame("no such frame")
        return payload[0]


_KINDS: Final[dict[type, int]] = {Hello: HELLO, Welcome: WELCOME, Refuse: REFUSE, Gone: GONE}
