"""What an engine keeps of its sessions: while they are attached, and afterwards. Says nothing to anybody."""

from collections.abc import Callable

from msgspec import Struct

from tllm_core.contracts.interfaces import PeerId
from tllm_core.contracts.messages import Hello, Welcome
from tllm_core.wire.liveness import Silence
from tllm_core.wire.session import MAX_FRONTENDS, Session


class FrontendIds:
    """Ids in [0, 32767), each again only after it was released, and as late as possible."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._next = 0

    def draw(self) -> int | None:
        """A free id, or None where all are in use."""
        if len(self._used) >= MAX_FRONTENDS:
            return None
        while self._next in self._used:
            self._next = (self._next + 1) % MAX_FRONTENDS
        drawn = self._next
        self._used.add(drawn)
        self._next = (drawn + 1) % MAX_FRONTENDS
        return drawn

    def release(self, frontend_id: int) -> None:
        self._used.discard(frontend_id)


class Attached:
    """One session in the table. `silence` is None where frontends are not judged."""

    __slots__ = (
        "confirmed",
        "frontend_id",
        "is_owner",
        "last_beat",
        "nonce",
        "opened_at",
        "peer",
        "session",
        "silence",
        "welcome",
    )

    def __init__(self, session: Session, hello: Hello, welcome: Welcome, silence: Silence | None, now: float) -> None:
        self.session, self.welcome, self.silence = session, welcome, silence
        self.peer, self.nonce = hello.peer, hello.nonce
        self.frontend_id = welcome.frontend_id
        self.opened_at = now
        self.is_owner = self.confirmed = False
        self.last_beat = 0

    def heard(self, now: float) -> None:
        if self.silence is not None:
            self.silence.heard(now)


class Tombstone(Struct, frozen=True):
    peer: PeerId
    nonce: bytes
    reason: str


class SessionTable:
    """The open sessions by number, with what else they are known by, and those that ended not long ago.

    open: all of them. half_open: those of which no authentic frame came yet, oldest first.
    """

    def __init__(self, tombstones: int) -> None:
        self.open: dict[int, Attached] = {}
        self.half_open: dict[int, Attached] = {}
        self._by_hello: dict[tuple[PeerId, bytes], int] = {}
        self._by_peer: dict[PeerId, int] = {}
        self._tombstones: dict[int, Tombstone] = {}
        self._max_tombstones = tombstones
        self._ids = FrontendIds()

    def draw_id(self) -> int | None:
        """A free frontend id, or None where all are in use."""
        return self._ids.draw()

    def release_id(self, attached: Attached) -> None:
        """All requests of an ended session are gone: its frontend id is free again."""
        self._ids.release(attached.frontend_id)

    def draw_number(self, random_bytes: Callable[[int], bytes]) -> int:
        while True:
            number = int.from_bytes(random_bytes(8), "little")
            if number and number not in self.open and number not in self._tombstones:
                return number

    def number_of(self, hello: Hello) -> int | None:
        """The session that this Hello began, also one that has ended; None for a new one."""
        return self._by_hello.get((hello.peer, hello.nonce))

    def add(self, attached: Attached) -> None:
        number = attached.session.number
        self.open[number] = self.half_open[number] = attached
        self._by_hello[attached.peer, attached.nonce] = number

    def confirm(self, attached: Attached) -> tuple[list[int], int | None]:
        """The frontend has its Welcome. What it replaces of the same peer: sessions still half-open, and the open one."""
        attached.confirmed = True
        abandoned = []
        for number, other in self.half_open.items():
            if other is attached:
                break  # the confirmation of a later one may still be on its way
            if other.peer == attached.peer:
                abandoned.append(number)
        del self.half_open[attached.session.number]
        earlier = self._by_peer.get(attached.peer)
        self._by_peer[attached.peer] = attached.session.number
        return abandoned, earlier

    def remove(self, number: int, reason: str) -> Attached:
        """Ends a session; a tombstone stays."""
        attached = self.open.pop(number)
        if self.half_open.pop(number, None) is not None:
            # The same Hello may be tried again.
            del self._by_hello[attached.peer, attached.nonce]
        if self._by_peer.get(attached.peer) == number:
            del self._by_peer[attached.peer]
        self._bury(number, Tombstone(attached.peer, attached.nonce, reason))
        return attached

    def has_peer(self, peer: PeerId) -> bool:
        """Whether a confirmed session of this peer is open."""
        return peer in self._by_peer

    def tombstone(self, number: int) -> Tombstone | None:
        return self._tombstones.get(number)

    def _bury(self, number: int, tombstone: Tombstone) -> None:
        self._tombstones[number] = tombstone
        if len(self._tombstones) > self._max_tombstones:
            oldest = next(iter(self._tombstones))
            old = self._tombstones.pop(oldest)
            if self._by_hello.get((old.peer, old.nonce)) == oldest:
                del self._by_hello[old.peer, old.nonce]
