"""What an engine keeps of one session: while it is attached, and afterwards."""

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
