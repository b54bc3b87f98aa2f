"""Sessions: Hello -> Welcome or Refuse, then a lane; Gone ends it. Sans-IO: frames and times are passed in.

`Session` is one open session seen from either end; `FrontendSession` is a frontend's side of the handshake around it
(`sessions.py` is the engine's). `send` takes a frame for the peer or raises as a port does.
"""

import hmac
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from tllm_core.contracts.interfaces import Frame, PeerId
from tllm_core.contracts.messages import (
    Beat,
    DownMessage,
    Gone,
    Hello,
    Refuse,
    Welcome,
)
from tllm_core.errors import FrameTooLarge, PortDown, PortFull
from tllm_core.wire.chunks import Assembly
from tllm_core.wire.codec import MalformedFrame, decode_down
from tllm_core.wire.header import (
    ACK,
    BEAT,
    CUT,
    GAP,
    GONE,
    MESSAGE,
    MIN_WIRE_VERSION,
    MORE,
    REFUSE,
    STEP,
    WELCOME,
    WIRE_VERSION,
    Header,
)
from tllm_core.wire.lane import Lane
from tllm_core.wire.settings import WireSettings
from tllm_core.wire.terms import Snapshot, Terms

Send: TypeAlias = Callable[[Frame], None]
Arrival: TypeAlias = tuple[Header, Sequence[Any]]


MAX_FRONTENDS: Final = 32_767
NONCE_SIZE: Final = 16
PEER_SIZE: Final = 16


class Session:
    """One open session: its lane, its seals and its port's `send`. Everything but `is_genuine` needs the link's lock.

    sign: what its own beats carry.
    """

    __slots__ = (
        "_assembly",
        "_beat_at",
        "_beats",
        "_counters",
        "_inward",
        "_outward",
        "_send",
        "_sign",
        "broken",
        "lane",
        "number",
        "terms",
    )

    def __init__(
        self,
        number: int,
        send: Send,
        terms: Terms,
        *,
        down: bool,
        settings: WireSettings | None = None,
        sign: tuple[Any, ...] = (),
    ) -> None:
        self.number, self.terms = number, terms
        self.lane = Lane(settings or terms.settings, terms.counters, reliable=terms.reliable, room=terms.room())
        self.broken: str | None = None
        self._assembly = Assembly(terms.settings.max_message_bytes)
        self._outward, self._inward = terms.seal(number, down=down), terms.seal(number, down=not down)
        self._send, self._counters, self._sign = send, terms.counters, sign
        self._beat_at, self._beats = float("-inf"), 0

    def is_genuine(self, frame: Frame) -> bool:
        return self._inward.is_genuine(frame)

    def offer(self, snapshot: Snapshot) -> None:
        """Accepts a message. Raises Overloaded where the backlog is full."""
        self.lane.sender.offer(*snapshot)

    def take(self, header: Header, now: float) -> bool:
        """What an authenticated frame means for the lane; True if its message is the next one."""
        sender = self.lane.sender
        if header.ack != sender.acked or header.flags & GAP:
            sender.acknowledge(header.ack, bool(header.flags & GAP), now)
        if header.kind == MESSAGE or header.kind == STEP:
            return self.lane.receiver.take(header.sequence, now)
        return False

    def pump(self, now: float) -> None:
        """Hands the port all that is due: new frames, resent ones, acknowledgements, beats."""
        sender = self.lane.sender
        while sender.acked != sender.last and (frame := sender.due(now)) is not None:
            if not self._put(now, frame.kind, frame.payload, frame.sequence, frame.flags):
                return
            sender.handed(frame, now)
        if self.lane.receiver.is_ack_due(now) and now >= sender.retry_at:
            self._put(now, ACK)
        if self.terms.beat_s and now >= self._beat_at and now >= sender.retry_at:
            self._beat_at = now + self.terms.beat_s
            self.beat(now, self._sign)

    def beat(self, now: float, payload: tuple[Any, ...] = ()) -> None:
        """Sends a sign of life with a strictly rising number; a port that is full loses it."""
        self._beats += 1
        self._put(now, BEAT, payload, self._beats)

    def gone(self, reason: str, now: float) -> None:
        """Tells the peer that the session ended."""
        self._put(now, *self.terms.special(Gone(reason)))

    def next_at(self) -> float | None:
        """When `pump` has to be called again, if nothing happens before."""
        at = self.lane.next_at()
        if not self.terms.beat_s:
            return at
        beat_at = max(self._beat_at, self.lane.sender.retry_at)
        return beat_at if at is None or beat_at < at else at

    def whole(self, header: Header, payload: Sequence[Any]) -> Sequence[Any] | None:
        """The payload of the message that this admitted frame completes, None if more is to come. Raises MalformedFrame."""
        flags = header.flags & (MORE | CUT)
        if not flags and not self._assembly.is_begun:
            return payload
        return self._assembly.add(header.kind, flags, payload)

    def _put(self, now: float, kind: int, payload: tuple[Any, ...] = (), sequence: int = 0, flags: int = 0) -> bool:
        receiver = self.lane.receiver
        if receiver.gap:
            flags |= GAP
        try:
            self._send(self._outward.frame(kind, payload, sequence=sequence, ack=receiver.ack, flags=flags))
        except (PortFull, PortDown) as error:
            self._counters["port_full" if isinstance(error, PortFull) else "port_down"] += 1
            self.lane.sender.blocked(now)
            return False
        except FrameTooLarge as error:
            # Chunks were cut to the port's limit; it has come down since, and what was accepted can't be sent any more.
            self._counters["frame_too_large"] += 1
            self.broken = str(error)
            self.lane.sender.blocked(now)
            return False
        receiver.told(now)
        return True


class FrontendSession:
    """A frontend's side: says Hello until it is welcomed or refused, then reads its session's frames.

    `session` is set once Welcome came, `refusal` on Refuse; `lost` says why an open session is no more.
    """

    def __init__(self, send: Send, terms: Terms, *, peer: PeerId, owner: bytes = b"") -> None:
        self.terms = terms
        self.session: Session | None = None
        self.welcome: Welcome | None = None
        self.refusal: Refuse | None = None
        self.lost: str | None = None
        self.beats: deque[Beat] = deque(maxlen=64)
        self._send, self._peer, self._owner = send, peer, owner
        self._gate = terms.gate(down=True)
        self._out, self._in = terms.seal(0, down=False), terms.seal(0, down=True)
        self._nonce = b""
        self._last_beat = 0

    @property
    def is_answered(self) -> bool:
        """Welcome or Refuse came."""
        return self.session is not None or self.refusal is not None

    @property
    def refused_because(self) -> str:
        return "" if self.refusal is None else self.refusal.reason

    def begin(self, nonce: bytes) -> None:
        """Forgets any earlier session; `nonce` is new and random."""
        self.session = self.welcome = self.refusal = self.lost = None
        self._nonce = nonce
        self._last_beat = 0

    def hello(self) -> Frame:
        """The frame to send, again and again, until `session` or `refusal` is set."""
        message = Hello(MIN_WIRE_VERSION, WIRE_VERSION, self._peer, self._nonce, self._owner)
        return self._out.frame(*self.terms.special(message))

    def read(self, frames: Iterable[Frame]) -> list[Arrival]:
        """Authentic frames of the open session; handshake frames take effect here, all others are dropped and counted."""
        arrivals: list[Arrival] = []
        for frame in frames:
            header = self._gate.read(frame)
            if header is None:
                continue
            session = self.session
            if header.kind == WELCOME or header.kind == REFUSE:
                self._handshake(header, frame)
            elif session is None or header.session != session.number:
                self.terms.counters["wrong_session"] += 1
            elif not session.is_genuine(frame):
                self.terms.counters["bad_mac"] += 1
            elif header.kind == GONE or header.kind == BEAT:
                self._take_special(header, frame)
            else:
                arrivals.append((header, frame[1:]))
        return arrivals

    def admit(self, arrivals: Iterable[Arrival], now: float) -> list[Arrival]:
        """The arrivals whose turn it is; needs the link's lock."""
        session = self.session
        return [] if session is None else [arrival for arrival in arrivals if session.take(arrival[0], now)]

    def decode(self, arrivals: Iterable[Arrival]) -> list[DownMessage]:
        """The messages of admitted arrivals. One that can't be read ends the session: what it said is lost."""
        messages: list[DownMessage] = []
        session = self.session
        for header, chunk in arrivals:
            assert session is not None  # there are no arrivals without one
            try:
                payload = session.whole(header, chunk)
                if payload is not None:
                    messages.append(payload[0] if self.terms.key is None else decode_down(header.kind, payload))
            except MalformedFrame as error:
                self.terms.counters["malformed"] += 1
                self.lost = f"the engine sent what can't be read: {error}"
                break
        return messages

    def _take_special(self, header: Header, frame: Frame) -> None:
        try:
            message = self.terms.open_special(header.kind, frame[1:])
        except MalformedFrame:
            self.terms.counters["malformed"] += 1
            return
        if isinstance(message, Gone):
            self.lost = message.reason
        elif header.sequence > self._last_beat:
            self._last_beat = header.sequence
            self.beats.append(message)
        else:
            self.terms.counters["stale_beat"] += 1

    def _handshake(self, header: Header, frame: Frame) -> None:
        counters = self.terms.counters
        if self.session is not None or not self._nonce:
            counters["late_handshake"] += 1
        elif header.session != 0:
            counters["wrong_session"] += 1
        elif not self._in.is_genuine(frame):
            counters["bad_mac"] += 1
        else:
            try:
                message = self.terms.open_special(header.kind, frame[1:])
            except MalformedFrame:
                counters["malformed"] += 1
                return
            if not hmac.compare_digest(message.nonce, self._nonce):
                counters["replayed"] += 1
            elif isinstance(message, Refuse):
                self.refusal = message
            else:
                self._open(message)

    def _open(self, welcome: Welcome) -> None:
        if welcome.version != WIRE_VERSION or not welcome.session or not 0 <= welcome.frontend_id < MAX_FRONTENDS:
            self.terms.counters["malformed"] += 1
            return
        own = self.terms.settings
        settings = replace(
            own,
            window_frames=max(1, min(own.window_frames, welcome.window_frames)),
            window_bytes=max(1, min(own.window_bytes, welcome.window_bytes)),
        )
        self.terms.max_bytes = min(own.max_message_bytes, welcome.max_message_bytes)
        # Beats say whose they are, for an engine that has forgotten it.
        sign = (self._peer,)
        session = Session(welcome.session, self._send, self.terms, down=False, settings=settings, sign=sign)
        session.lane.receiver.urgent = True  # any frame of the session tells the engine that Welcome arrived
        self.welcome, self.session = welcome, session
