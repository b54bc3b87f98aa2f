"""The real links, made resumable, with a log of what each accepted and handed out."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tllm_core.contracts.interfaces import Frame, PeerId
from tllm_core.contracts.messages import Abort, Control, DownMessage, Goodbye, Stop, Submit, UpMessage
from tllm_core.wire.codec import encode
from tllm_core.wire.link import EngineLink, FrontendLink
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.path import PathWatch
from tllm_core.wire.settings import WireSettings
from tllm_core.wire.terms import Snapshot

from .network import EnginePort, FrontendPort
from .timeline import NEVER, Blocked
from .violation import Violation

KEY = b"k" * 32
SESSION_AND_ACK = struct.Struct("<16xQ8xQ")
"""Of a header."""


def name_of(message: UpMessage) -> tuple[str, int]:
    """What tells the messages of one session apart."""
    if isinstance(message, Submit):
        return "submit", message.client_id
    if isinstance(message, Abort):
        return "abort", message.client_id or 0
    if isinstance(message, Control):
        return "control", message.call_id
    return type(message).__name__, 0


class Lane:
    """What both ends of one session have said and heard: the yardstick for order, loss and acknowledgement."""

    __slots__ = (
        "down",
        "down_ends",
        "heard_down",
        "heard_up",
        "number",
        "served_by",
        "taken_up",
        "told_down",
        "up",
        "up_ends",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.up: list[tuple[str, int]] = []
        self.down: list[Snapshot] = []
        self.up_ends: list[int] = []
        self.down_ends: list[int] = []
        """The last frame of each message."""
        self.served_by: object = None
        self.taken_up = self.heard_up = self.heard_down = self.told_down = 0
        """Messages that the engine has taken; acted upon; that the frontend got from its lane; delivered to its ledger."""


def is_early(ack: int, told: int, ends: Sequence[int]) -> bool:
    """Whether more is acknowledged than `told` messages, and what came of the next one before it was whole."""
    return told < len(ends) and ack >= ends[told]


class _Resumable:
    """Keeps a call's own deadline across Blocked, and what the pump waits for, so that `_hurry` still finds a sleeper."""

    _until: float | None = None

    def _resume(self, receive: Callable[[float | None], list[Any]], timeout: float | None, now: float) -> list[Any]:
        if self._until is None:
            self._until = NEVER if timeout is None else now + timeout
        try:
            items = receive(None if self._until == NEVER else max(0.0, self._until - now))
        except Blocked as blocked:
            (self._waits_until,) = blocked.args
            raise
        self._until = None
        return items


class SimFrontendLink(_Resumable, FrontendLink):
    """`lanes`: every session of the simulation. `around_send`: what other threads do before and after a send."""

    def __init__(
        self,
        port: FrontendPort,
        generation_port: EnginePort,
        peer: PeerId,
        lanes: dict[int, Lane],
        rng: random.Random,
        *,
        owner: bytes,
        by_reference: bool,
        settings: WireSettings,
        liveness: LivenessSettings,
    ) -> None:
        super().__init__(
            port,
            generation_port.address,
            peer=peer,
            key=KEY,
            owner=owner,
            by_reference=by_reference,
            reliable=port.network.weather.reliable,
            settings=settings,
            liveness=liveness,
            clock=port.timeline.clock,
        )
        # Frontends are judged in every mode here, and so they beat in every mode.
        self._terms.beat_s = liveness.frontend_beat_s
        self.lanes, self.lane = lanes, None
        self.is_watch = port.path.service == "watcher"
        self.around_send: Callable[[str], None] = lambda when: None
        self._begin, self._begun = self._sessions.begin, False
        self._hello_due = 0.0
        self._said_goodbye = False
        self._sessions.begin = self._begin_once
        self._rng = rng
        port.inspect = self._inspect

    def _begin_once(self, nonce: bytes) -> None:
        """`open` runs again from its beginning each time that it would have gone on waiting; it is one attempt all the same."""
        if not self._begun:
            self._begun = True
            self._begin(self._rng.randbytes(len(nonce)))

    def _say(self, frame: Frame) -> None:
        """Nor is Hello said before its time, each time that something wakes who waits for the answer."""
        if self._clock() >= self._hello_due:
            super()._say(frame)

    def _listen(self, until: float) -> list[Any]:
        if self._clock() >= self._hello_due:
            self._hello_due = until
        return super()._listen(self._hello_due)

    def open(self, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> Any:
        welcome = super().open(timeout, meanwhile)
        self._begun, self._hello_due = False, 0.0
        self.lane = self.lanes.setdefault(welcome.session, Lane(welcome.session))  # the engine may have spoken first
        return welcome

    def send(self, message: UpMessage) -> None:
        if isinstance(message, (Stop, Goodbye)):
            if self._said_goodbye:
                return  # `close` runs again from its beginning, too
            self._said_goodbye = True
        self.around_send("before")
        super().send(message)
        self.lane.up.append(name_of(message))
        self.lane.up_ends.append(self._session.lane.sender.last)
        self.around_send("after")

    def receive(self, timeout: float | None) -> list[DownMessage]:
        if self.is_watch and self.lane is not None:
            self.lane.told_down = self.lane.heard_down
        messages = self._resume(super().receive, timeout, self._port.timeline.now)
        if messages:
            self._check_order(messages)
        return messages

    def _check_order(self, messages: Sequence[DownMessage]) -> None:
        lane = self.lane
        for message in messages:
            if lane.heard_down >= len(lane.down):
                raise Violation("I6", f"session {lane.number:x} handed out more than the engine sent")
            payload = lane.down[lane.heard_down][1]
            if self._terms.key is None:
                same = payload[0] is message
            else:
                same = self._port.max_frame is None or encode(message)[1] == payload
            if not same:
                raise Violation("I6", f"session {lane.number:x} handed out message {lane.heard_down + 1} out of turn")
            lane.heard_down += 1

    def _inspect(self, frame: Frame) -> None:
        session, ack = SESSION_AND_ACK.unpack_from(frame[0])
        lane = self.lane
        if lane is not None and session == lane.number and is_early(ack, lane.told_down, lane.down_ends):
            raise Violation("I4", f"the frontend acknowledged {ack} messages and has delivered {lane.told_down}")


class SimEngineLink(_Resumable, EngineLink):
    def __init__(
        self,
        port: EnginePort,
        lanes: dict[int, Lane],
        rng: random.Random,
        *,
        owner: bytes,
        info: Any,
        by_reference: bool,
        settings: WireSettings,
        liveness: LivenessSettings,
    ) -> None:
        super().__init__(
            port,
            key=KEY,
            owner=owner,
            info=info,
            by_reference=by_reference,
            reliable=port.network.weather.reliable,
            settings=settings,
            clock=port.timeline.clock,
        )
        self.lanes = lanes
        # In every mode, as above.
        self._sessions._liveness = liveness
        self._sessions._path = PathWatch(liveness.broker_down_after_s)
        self._sessions._random = rng.randbytes
        self._offer, self._sessions.offer = self._sessions.offer, self._log_offer
        self.in_hand: list[tuple[int, UpMessage]] = []
        self._read_before: list[tuple[int, UpMessage]] = []
        self._flush_until: float | None = None
        self.ended = 0
        self.leaving = False
        port.inspect = self._inspect

    def _log_offer(self, number: int, snapshot: Snapshot) -> bool:
        accepted = self._offer(number, snapshot)
        if accepted and number in self._sessions.table:
            lane = self._lane(number)
            lane.down.append(snapshot)
            lane.down_ends.append(self._sessions.table[number].session.lane.sender.last)
        return accepted

    def _lane(self, number: int) -> Lane:
        lane = self.lanes.get(number)
        if lane is None:
            lane = self.lanes[number] = Lane(number)
        return lane

    def receive(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        self.act_upon()
        messages = self.read(timeout)
        self.check_order(messages)
        return messages

    def read(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        """Who asks for more has taken charge of all that it got before, which may be acknowledged then."""
        for session, _ in self._read_before:
            self._lane(session).taken_up += 1
        self._read_before = []
        self._read_before = messages = self._resume(super().receive, timeout, self._port.timeline.now)
        return messages

    def act_upon(self) -> None:
        """What was handed out before was acted upon."""
        for session, _ in self.in_hand:
            self._lane(session).heard_up += 1
        self.in_hand.clear()

    def check_order(self, messages: Sequence[tuple[int, UpMessage]]) -> None:
        """Whether these, which are handed out now, are what their frontends said next."""
        ahead: dict[int, int] = {}
        for session, message in messages:
            lane = self._lane(session)
            if lane.served_by is None:
                lane.served_by = self
            if lane.served_by is not self:
                raise Violation("I9", f"a session of another generation, {session:x}, says {name_of(message)}")
            at = lane.heard_up + ahead.get(session, 0)
            if isinstance(message, Goodbye) and (at >= len(lane.up) or lane.up[at][0] != "Goodbye"):
                continue  # the session ended by itself
            if at >= len(lane.up) or lane.up[at] != name_of(message):
                raise Violation("I6", f"session {session:x}: message {at + 1} is {name_of(message)}, out of turn")
            ahead[session] = ahead.get(session, 0) + 1
            self.in_hand.append((session, message))

    def _inspect(self, frame: Frame) -> None:
        session, ack = SESSION_AND_ACK.unpack_from(frame[0])
        lane = self.lanes.get(session)
        if lane is not None and not self.leaving and is_early(ack, lane.taken_up, lane.up_ends):
            raise Violation("I4", f"the engine acknowledged {ack} messages and has taken {lane.taken_up}")

    def end(self, session: int, reason: str) -> None:
        self.ended += 1
        super().end(session, reason)

    def close(self, flush_s: float = 1.0) -> None:
        """Resumable: the port stays open until all is flushed, and what comes meanwhile falls to nobody."""
        self.in_hand.clear()
        if self._flush_until is None:
            self.leaving = True
            self._flush_until = self._clock() + flush_s
        self._closed = False
        self._port.keep_open = True
        super().close(self._flush_until - self._clock())
        self._port.keep_open = False
        self._port.close()
