"""Pumps sessions over ports: the only place where they meet each other, the clock and threads.

One lock is around the lanes and `port.send`; nobody holds it while blocked in `port.receive`. A message counts as delivered,
and is acknowledged, once `receive` is called again.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from tllm_core.contracts.interfaces import EngineAddress, EnginePort, Frame, FrontendPort, PeerId, Port
from tllm_core.contracts.messages import (
    Beat,
    ControlReply,
    DownMessage,
    EngineInfo,
    Obituary,
    Stopping,
    UpMessage,
    Welcome,
)
from tllm_core.errors import Expelled, FrameTooLarge, PortClosed, PortDown, PortFull, Refused, TransportError
from tllm_core.wire.header import SEALED_SIZE
from tllm_core.wire.liveness import DEFAULT_LIVENESS, LivenessSettings
from tllm_core.wire.pump import NEVER, Clock, Pump
from tllm_core.wire.session import NONCE_SIZE, Arrival, FrontendSession, Session
from tllm_core.wire.sessions import EngineSessions
from tllm_core.wire.settings import DEFAULT_WIRE, WireSettings
from tllm_core.wire.terms import Snapshot, Terms


def _room(port: Port) -> int | None:
    """Bytes of payload that fit in one frame of the port."""
    return None if port.max_frame is None else max(1, port.max_frame - SEALED_SIZE)


class FrontendLink(Pump):
    """A frontend's end of one session. `send`, `wake` and `close` from any thread; `open` and `receive` from one at a time.

    `counters`: what was dropped, resent and the like, by reason.
    """

    def __init__(
        self,
        port: FrontendPort,
        address: EngineAddress,
        *,
        peer: PeerId,
        key: bytes,
        owner: bytes = b"",
        by_reference: bool = False,
        reliable: bool = True,
        settings: WireSettings = DEFAULT_WIRE,
        liveness: LivenessSettings = DEFAULT_LIVENESS,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(port, clock)
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._terms = Terms(
            key=None if by_reference else key,
            generation=address.generation,
            settings=settings,
            counters=self.counters,
            reliable=reliable,
            room=partial(_room, port),
            beat_s=0.0 if by_reference else liveness.frontend_beat_s,
        )
        self._send_frame = port.send
        self._sessions = FrontendSession(port.send, self._terms, peer=peer, owner=owner)
        self._session: Session | None = None
        self._early: list[Arrival] = []

    def open(self, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> Welcome:
        """Repeats Hello until it is answered; may be called again once the session is lost. `meanwhile` is called with each
        Hello, and what it raises is raised.

        Raises Refused, TransportError where nobody answers for `timeout` seconds, or PortClosed.
        """
        sessions, deadline = self._sessions, self._clock() + timeout
        with self._lock:
            self._session = None
            sessions.begin(os.urandom(NONCE_SIZE))
        hello, retry_s = sessions.hello(), self._settings.hello_retry_s
        while not sessions.is_answered:
            self._say(hello)
            meanwhile()
            self._early = self._listen(min(deadline, self._clock() + retry_s))
            if self._clock() >= deadline and not sessions.is_answered:
                raise TransportError(f"the engine did not answer within {timeout:.3g} s{self._describe_path()}")
            retry_s = min(retry_s * 2, 1.0)
        session, welcome = sessions.session, sessions.welcome
        if session is None or welcome is None:
            raise Refused(f"the engine refused this frontend: {sessions.refused_because}")
        with self._lock:
            self._session = session
            session.pump(self._clock())
        return welcome

    def send(self, message: UpMessage) -> None:
        """Accepts a message; from then on it is the lane's business. From any thread; never blocks.

        Raises Overloaded, FrameTooLarge, Expelled, or PortClosed.
        """
        snapshot = self._terms.snapshot(message)
        with self._lock:
            session = self._open_session()
            session.offer(snapshot)
            now = self._clock()
            session.pump(now)
            self._hurry(session.next_at())

    def receive(self, timeout: float | None) -> list[DownMessage]:
        """The next messages, in order; [] after `timeout` seconds (None = no limit) or `wake`.

        Raises PortClosed, and Expelled once the session is lost and all that came before was returned.
        """
        if self._early:
            early, self._early = self._early, []
            return self._deliver(early, self._clock())
        self._open_session()
        return self._wait(timeout, self._take)

    def take_beats(self) -> list[Beat]:
        """The beats that came since the last call."""
        beats = self._sessions.beats
        return [beats.popleft() for _ in range(len(beats))]

    def idle(self) -> bool:
        """Nothing that was sent is unacknowledged."""
        session = self._session
        return session is None or session.lane.sender.is_idle

    def close(self) -> None:
        """Closes the port; idempotent. Frames that the port has taken are still sent."""
        self._closed = True
        self._port.close()

    def _take(self, frames: Sequence[Frame], now: float) -> list[DownMessage]:
        if not frames:
            return []
        messages = self._deliver(self._sessions.read(frames), now)
        if not messages:
            self._open_session()
        return messages

    def _deliver(self, arrivals: list[Arrival], now: float) -> list[DownMessage]:
        with self._lock:
            admitted = self._sessions.admit(arrivals, now)
        return self._sessions.decode(admitted)

    def _prepare(self, now: float) -> float | None:
        session = self._session
        if session is None:
            return None
        session.lane.receiver.delivered()
        session.pump(now)
        return session.next_at()

    def _path_changed(self) -> None:
        if self._session is not None:
            self._session.lane.path_changed()

    def _open_session(self) -> Session:
        if self._closed:
            raise PortClosed("this link was closed")
        if self._sessions.lost is not None:
            raise Expelled(f"the engine ended this session: {self._sessions.lost}")
        if self._session is None:
            raise TransportError("this link is not open")
        if self._session.broken is not None:
            raise TransportError(f"what was accepted can't be sent any more: {self._session.broken}")
        return self._session

    def _say(self, frame: Frame) -> None:
        """Hello is said again if it gets lost."""
        try:
            self._send_frame(frame)
        except (PortFull, PortDown, FrameTooLarge):
            self.counters["handshake_lost"] += 1

    def _listen(self, until: float) -> list[Arrival]:
        """Reads until Welcome, Refuse or `until`."""
        sessions = self._sessions
        while not sessions.is_answered and (left := until - self._clock()) > 0:
            arrivals = sessions.read(self._port.receive(left))
            if arrivals:
                return arrivals
        return []

    def _describe_path(self) -> str:
        state = self._port.state
        return "" if state.up else f" (no path: {state.reason})"


class EngineLink(Pump):
    """An engine's end of all its sessions. `receive` and `close` from one thread; the rest from any.

    `counters`: what was dropped, refused, resent and the like, by reason.
    """

    def __init__(
        self,
        port: EnginePort,
        *,
        key: bytes,
        owner: bytes = b"",
        info: EngineInfo,
        by_reference: bool = False,
        reliable: bool = True,
        settings: WireSettings = DEFAULT_WIRE,
        liveness: LivenessSettings = DEFAULT_LIVENESS,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(port, clock)
        self.counters: Counter[str] = Counter()
        self._terms = Terms(
            key=None if by_reference else key,
            generation=port.address.generation,
            settings=settings,
            counters=self.counters,
            reliable=reliable,
            room=partial(_room, port),
        )
        self._sessions = EngineSessions(
            port.send,
            port.forget,
            self._terms,
            owner=owner,
            info=info,
            liveness=None if by_reference else liveness,
            random_bytes=os.urandom,
        )

    @property
    def sessions(self) -> Collection[int]:
        """The open sessions."""
        return tuple(self._sessions.table)

    def receive(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        """(session, message), in order; a session that ends by itself yields Goodbye. [] after `timeout` or `wake`.

        Raises PortClosed.
        """
        return self._wait(timeout, self._take)

    def send(self, session: int, message: DownMessage) -> bool:
        """Accepts a message for a session, or returns False where its lane has no room: nothing was taken.

        A session that has ended is counted, and True. Raises FrameTooLarge or PortClosed.
        """
        snapshot = self._snapshot(message)
        with self._lock:
            accepted = self._sessions.offer(session, snapshot)
            self._sessions.pump_one(session, self._clock())
            self._hurry_up()
        return accepted

    def broadcast(self, message: DownMessage) -> None:
        """Sends a message to every session whose lane has room; Stopping and Obituary always find it, and are told also to
        whoever asks to attach later."""
        snapshot = self._terms.snapshot(message)
        with self._lock:
            if isinstance(message, Stopping | Obituary):
                self._sessions.close_with(snapshot)
            for session in list(self._sessions.table):
                if not self._sessions.offer(session, snapshot):
                    self.counters["broadcast_full"] += 1
            self._sessions.pump(self._clock())
            self._hurry_up()

    def beat(self, beat: Beat) -> None:
        """Tells every session that the world is alive; a port that is full loses it."""
        with self._lock:
            self._sessions.beat(beat, self._clock())

    def end(self, session: int, reason: str) -> None:
        """Gives a session up, whose requests are gone: its frontend hears `reason`. Nothing is yielded for it any more."""
        with self._lock:
            self._sessions.end(session, reason, self._clock())

    def close(self, flush_s: float = 1.0) -> None:
        """Closes the port once all that was sent is acknowledged, or after `flush_s` seconds; idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline = self._clock() + flush_s
        try:
            while not self._sessions.is_idle and (now := self._clock()) < deadline:
                frames = self._receive(now, deadline)
                self._take(frames, self._clock())
        except PortClosed:
            pass
        finally:
            self._port.close()

    def _snapshot(self, message: DownMessage) -> Snapshot:
        """A reply whose values can't be encoded fails that call alone."""
        try:
            return self._terms.snapshot(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if not isinstance(message, ControlReply):
                raise
            reply = ControlReply(message.call_id, error=f"the reply can't cross a process boundary: {error}")
            return self._terms.snapshot(reply)

    def _take(self, frames: Sequence[Frame], now: float) -> list[tuple[int, UpMessage]]:
        sessions = self._sessions
        with self._lock:
            messages = sessions.take(frames, now) if frames else []
            if sessions.tend_at is not None and now >= sessions.tend_at:
                messages += sessions.tend(now, self._port.path_ok_at())
        return messages

    def _prepare(self, now: float) -> float | None:
        self._sessions.delivered()
        self._sessions.pump(now)
        return self._sessions.next_at()

    def _path_changed(self) -> None:
        self._sessions.path_changed()

    def _hurry_up(self) -> None:
        if self._waits_until != NEVER:
            self._hurry(self._sessions.next_at())
