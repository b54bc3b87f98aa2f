"""An engine's side of all its sessions: attach, refuse, expel, tombstones. Sans-IO.

A session is half-open from Welcome until the first authentic frame of it: until then it replaces nothing, and it is capped
and expires. Ended sessions leave a tombstone, which answers late frames with Gone and late Hellos not at all. Once the
tombstone is gone too, a beat is still answered: its MAC shows that the session was one of this generation, and it says whose.
"""

import hmac
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from tllm_core.contracts.interfaces import Frame, PeerId
from tllm_core.contracts.messages import (
    FINISH_CODES,
    Abort,
    Beat,
    EngineInfo,
    ErrorReport,
    Gone,
    Goodbye,
    Hello,
    Refuse,
    RowExtra,
    StepBatch,
    Stop,
    Submit,
    UpMessage,
    Welcome,
)
from tllm_core.errors import FrameTooLarge, Overloaded, PortDown, PortFull
from tllm_core.wire.attached import Attached, SessionTable, Tombstone
from tllm_core.wire.codec import MalformedFrame, decode_up, encode
from tllm_core.wire.header import (
    ACK,
    BEAT,
    HELLO,
    MESSAGE,
    MIN_WIRE_VERSION,
    WIRE_VERSION,
    Header,
    size_of,
)
from tllm_core.wire.liveness import LivenessSettings, Silence
from tllm_core.wire.path import PathWatch
from tllm_core.wire.session import MAX_FRONTENDS, NONCE_SIZE, PEER_SIZE, Session
from tllm_core.wire.terms import Snapshot, Terms

FRONTEND_SHIFT: Final = 48
"""The frontend's id is in the high 16 bits of its client ids."""
LATE_PER_S: Final = 64
"""Beats of forgotten sessions that are looked into within a second, as each costs the making of two keys."""


class EngineSessions:
    """All sessions of one engine generation. The caller holds the link's lock.

    send: hands a frame for a peer to the port. forget: frees what the port keeps for a peer. random_bytes: `os.urandom`.
    """

    def __init__(
        self,
        send: Callable[[PeerId, Frame], None],
        forget: Callable[[PeerId], None],
        terms: Terms,
        *,
        owner: bytes,
        info: EngineInfo,
        liveness: LivenessSettings | None,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.terms, self.counters = terms, terms.counters
        self._send, self._forget, self._random = send, forget, random_bytes
        self._owner, self._info, self._liveness = owner, info, liveness
        self._path = None if liveness is None else PathWatch(liveness.broker_down_after_s)
        self._gate = terms.gate(down=False)
        self._in, self._out = terms.seal(0, down=False), terms.seal(0, down=True)
        self._table = SessionTable(terms.settings.tombstones)
        self.table = self._table.open
        self._leaving: list[Attached] = []
        self._active: dict[int, Attached] = {}
        self.tend_at: float | None = None
        self._late_since, self._late = float("-inf"), 0
        self._last_words: Snapshot | None = None

    # ------------------------------------------------------------------------------------------------- incoming

    def take(self, frames: Iterable[Frame], now: float) -> list[tuple[int, UpMessage]]:
        """What the frames say, in order; whatever is not authentic, in turn and allowed is dropped and counted."""
        messages: list[tuple[int, UpMessage]] = []
        for frame in frames:
            header = self._gate.read(frame)
            if header is None:
                continue
            if header.kind == HELLO:
                self._take_hello(header, frame, now)
                continue
            attached = self.table.get(header.session)
            if attached is None:
                self._answer_late(header, frame, now)
            elif not attached.session.is_genuine(frame):
                self.counters["bad_mac"] += 1
            else:
                self._take_frame(attached, header, frame[1:], now, messages)
        return messages

    def delivered(self) -> None:
        """All messages that were returned have been acted upon."""
        for attached in self._active.values():
            attached.session.lane.receiver.delivered()
        if self._leaving:
            for attached in self._leaving:
                self._table.release_id(attached)
            self._leaving.clear()

    def tend(self, now: float, path_ok_at: float) -> list[tuple[int, UpMessage]]:
        """Ends what has been half-open or silent for too long; call it after the port was drained."""
        ended: list[tuple[int, UpMessage]] = []
        if self.tend_at is None or now < self.tend_at:
            return ended
        for number, attached in list(self._table.half_open.items()):
            if now - attached.opened_at > self.terms.settings.half_open_s:
                self.counters["half_open_expired"] += 1
                self._table.release_id(self._remove(number, "the attach was not completed in time", now))
        for number, attached in list(self.table.items()):
            reason = self._objection(attached, now, path_ok_at)
            if reason is not None:
                ended += self._leave(number, reason, now)
        if self._path is not None and (down_s := self._path.lost_for_s(now, path_ok_at)) is not None:
            self.counters["path_lost"] += 1
            for number in list(self.table):
                ended += self._leave(number, f"the engine has had no path for {down_s:.1f} s", now)
        self.tend_at = now + self._check_every_s() if self.table else None
        return ended

    def _objection(self, attached: Attached, now: float, path_ok_at: float) -> str | None:
        """Why a session has to end."""
        if attached.session.broken is not None:
            return attached.session.broken
        if attached.silence is not None and attached.confirmed and attached.silence.is_over(now, path_ok_at):
            self.counters["silent_frontends"] += 1
            return f"silent for {attached.silence.after_s:g} s"
        return None

    # ------------------------------------------------------------------------------------------------- outgoing

    def offer(self, number: int, snapshot: Snapshot) -> bool:
        """Accepts a message for a session, or returns False where its backlog is full."""
        attached = self.table.get(number)
        if attached is None:
            self.counters["unknown_session"] += 1
            return True
        try:
            attached.session.offer(snapshot)
        except Overloaded:
            return False
        self._active[number] = attached
        return True

    def close_with(self, words: Snapshot) -> None:
        """The last words of this engine: who asks to attach from now on hears them, too."""
        self._last_words = self._last_words or words

    def beat(self, beat: Beat, now: float) -> None:
        """Tells every session that the world is alive; takes no sequence number and no window."""
        payload: tuple[Any, ...] = (beat,) if self.terms.key is None else encode(beat)[1]
        for attached in self.table.values():
            attached.session.beat(now, payload)

    def end(self, number: int, reason: str, now: float) -> None:
        """Gives a session up, whose requests are gone."""
        if number in self.table:
            self._table.release_id(self._remove(number, reason, now))

    def pump(self, now: float) -> None:
        """Hands the port all that is due on any session."""
        for number, attached in list(self._active.items()):
            self._pump(attached, now)
            if attached.session.lane.is_quiet:
                del self._active[number]

    def pump_one(self, number: int, now: float) -> None:
        """Hands the port all that is due on one session."""
        attached = self.table.get(number)
        if attached is not None:
            self._pump(attached, now)

    def _pump(self, attached: Attached, now: float) -> None:
        attached.session.pump(now)
        if attached.session.broken is not None:
            self.tend_at = now

    def path_changed(self) -> None:
        """The port reconnected: whatever was on its way may be lost."""
        for attached in self.table.values():
            attached.session.lane.path_changed()
        self._active.update(self.table)

    def next_at(self) -> float | None:
        """When `pump` and `tend` have to be called again, if nothing happens before."""
        at = self.tend_at
        for attached in self._active.values():
            due = attached.session.next_at()
            if due is not None and (at is None or due < at):
                at = due
        return at

    @property
    def is_idle(self) -> bool:
        """Every session that has spoken has acknowledged all that it was sent."""
        return all(a.session.lane.sender.is_idle for a in self._active.values() if a.confirmed)

    # ------------------------------------------------------------------------------------------------- handshake

    def _take_hello(self, header: Header, frame: Frame, now: float) -> None:
        if header.session != 0 or not self._in.is_genuine(frame):
            self.counters["bad_mac"] += 1
            return
        try:
            hello = self.terms.open_special(HELLO, frame[1:])
        except MalformedFrame:
            self.counters["malformed"] += 1
            return
        if len(hello.peer) != PEER_SIZE or len(hello.nonce) != NONCE_SIZE or hello.peer[0] == 0:
            self.counters["malformed"] += 1
        elif not hello.min_version <= WIRE_VERSION <= hello.max_version:
            self._refuse(hello, _version_reason(hello))
        else:
            self._welcome(hello, now)

    def _welcome(self, hello: Hello, now: float) -> None:
        number = self._table.number_of(hello)
        if number is None:
            attached = self._attach(hello, now)
        elif number in self.table:
            attached = self.table[number]
        else:
            self.counters["replayed"] += 1
            return
        if attached is not None:
            self._post(hello.peer, self._out.frame(*self.terms.special(attached.welcome)))

    def _attach(self, hello: Hello, now: float) -> Attached | None:
        settings = self.terms.settings
        if len(self._table.half_open) >= settings.max_half_open:
            self.counters["half_open_full"] += 1
            return None
        frontend_id = self._table.draw_id()
        if frontend_id is None:
            self._refuse(hello, f"all {MAX_FRONTENDS} frontend ids are in use")
            return None
        number = self._table.draw_number(self._random)
        welcome = Welcome(
            nonce=hello.nonce,
            session=number,
            frontend_id=frontend_id,
            version=WIRE_VERSION,
            window_frames=settings.window_frames,
            window_bytes=settings.window_bytes,
            max_message_bytes=settings.max_message_bytes,
            info=self._info,
        )
        session = Session(number, partial(self._send, hello.peer), self.terms, down=True)
        attached = Attached(session, hello, welcome, self._new_silence(), now)
        attached.is_owner = bool(self._owner) and hmac.compare_digest(hello.owner, self._owner)
        self._table.add(attached)
        if self._last_words is not None:
            self.offer(number, self._last_words)
        self.tend_at = now if self.tend_at is None else self.tend_at
        return attached

    def _refuse(self, hello: Hello, reason: str) -> None:
        self.counters["refused"] += 1
        message = Refuse(hello.nonce, reason, MIN_WIRE_VERSION, WIRE_VERSION)
        self._post(hello.peer, self._out.frame(*self.terms.special(message)))

    def _post(self, peer: PeerId, frame: Frame) -> None:
        """Sends what is asked for again if it gets lost."""
        try:
            self._send(peer, frame)
        except (PortFull, PortDown, FrameTooLarge):
            self.counters["handshake_lost"] += 1

    def _new_silence(self) -> Silence | None:
        if self._liveness is None:
            return None
        return Silence(self._liveness.frontend_dead_after_s, self._liveness.reconnect_grace_s)

    def _check_every_s(self) -> float:
        every_s = self.terms.settings.half_open_s / 4
        liveness = self._liveness
        # A judge that looks at most twice within a deadline would take itself for frozen.
        if liveness is None:
            return every_s
        return min(every_s, liveness.frontend_dead_after_s / 8, liveness.broker_down_after_s / 8)

    # ---------------------------------------------------------------------------------------------------- frames

    def _take_frame(
        self,
        attached: Attached,
        header: Header,
        payload: Sequence[Any],
        now: float,
        messages: list[tuple[int, UpMessage]],
    ) -> None:
        if not attached.confirmed:
            messages += self._confirm(attached, now)
        session = attached.session
        if header.kind == BEAT:
            if header.sequence > attached.last_beat:
                attached.last_beat = header.sequence
                attached.heard(now)
            else:
                self.counters["stale_beat"] += 1
        elif header.kind not in (MESSAGE, ACK):
            self.counters["unknown_kind"] += 1
            return
        taken = session.take(header, now)
        self._active[session.number] = attached
        if taken:
            attached.heard(now)
            try:
                whole = session.whole(header, payload)
            except MalformedFrame as error:
                # Whose request it was is not known, and its frontend must not wait for it.
                self.counters["malformed"] += 1
                messages += self._leave(session.number, f"the engine can't read what came: {error}", now)
                return
            message = None if whole is None else self._decode(attached, header.kind, whole)
            if message is not None:
                messages.append((session.number, message))
                if type(message) is Goodbye:
                    self._leaving.append(self._remove(session.number, "the frontend said goodbye", now, tell=False))

    def _decode(self, attached: Attached, kind: int, payload: Sequence[Any]) -> UpMessage | None:
        """The message, or None where it can't be read or is not allowed."""
        try:
            message: UpMessage = payload[0] if self.terms.key is None else decode_up(kind, payload)
        except MalformedFrame as error:
            self.counters["malformed"] += 1
            if error.client_id is not None:
                row = _error_row(error.client_id, f"the request can't be read: {error}")
                self.offer(attached.session.number, self.terms.snapshot(row))
            return None
        if type(message) is Submit or type(message) is Abort:
            client_id = message.client_id
            if client_id is not None and client_id >> FRONTEND_SHIFT != attached.frontend_id:
                self.counters["foreign_client_id"] += 1
                return None
        elif type(message) is Stop and not attached.is_owner:
            self.counters["stop_refused"] += 1
            return None
        return message

    def _confirm(self, attached: Attached, now: float) -> list[tuple[int, UpMessage]]:
        """The frontend has its Welcome; whatever the same peer had opened before ends."""
        abandoned, earlier = self._table.confirm(attached)
        for number in abandoned:
            self._table.release_id(self._remove(number, "the frontend began anew", now, tell=False))
        return [] if earlier is None else self._leave(earlier, "the frontend began anew", now)

    def _leave(self, number: int, reason: str, now: float) -> list[tuple[int, UpMessage]]:
        """Ends a session by itself; whoever serves it hears Goodbye."""
        self._leaving.append(self._remove(number, reason, now))
        return [(number, Goodbye())]

    def _remove(self, number: int, reason: str, now: float, *, tell: bool = True) -> Attached:
        self._active.pop(number, None)
        attached = self._table.remove(number, reason)
        if tell:
            attached.session.gone(reason, now)
        if not self._table.has_peer(attached.peer):
            self._forget(attached.peer)
        return attached

    def _answer_late(self, header: Header, frame: Frame, now: float) -> None:
        tombstone = self._table.tombstone(header.session) or self._forgotten(header, frame, now)
        if tombstone is None:
            self.counters["wrong_session"] += 1
        elif not self.terms.seal(header.session, down=False).is_genuine(frame):
            self.counters["bad_mac"] += 1
        else:
            self.counters["late_frames"] += 1
            seal = self.terms.seal(header.session, down=True)
            self._post(tombstone.peer, seal.frame(*self.terms.special(Gone(tombstone.reason))))

    def _forgotten(self, header: Header, frame: Frame, now: float) -> Tombstone | None:
        """What a beat of a session without a tombstone says of it; to be believed only once its MAC was checked."""
        is_signed = header.kind == BEAT and len(frame) == 2 and size_of(frame[1]) == PEER_SIZE
        if not is_signed or not header.session:
            return None
        if now - self._late_since >= 1.0:
            self._late_since, self._late = now, 0
        self._late += 1
        if self._late > LATE_PER_S:
            self.counters["late_flood"] += 1
            return None
        return Tombstone(bytes(frame[1]), b"", "it ended so long ago that the reason is not known any more")


def _version_reason(hello: Hello) -> str:
    return (
        f"the engine speaks wire version {WIRE_VERSION}, the frontend {hello.min_version} to {hello.max_version}; "
        "install the same tllm-core on both sides"
    )


def _error_row(client_id: int, text: str) -> StepBatch:
    """A batch of one row that ends a request with an error."""
    return StepBatch(
        [client_id],
        [],
        counts=[0],
        finishes=[(0, FINISH_CODES["error"], None)],
        extras=[(0, RowExtra(error=ErrorReport(text)))],
    )
