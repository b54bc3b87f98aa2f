"""Frames within one process: bounded queues, passed by reference.

An engine and its frontends meet in a process-wide table under (engine name, generation); frames are neither copied nor read.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from tllm_core.contracts.interfaces import (
    PORT_UP,
    Capability,
    EngineAddress,
    EnginePort,
    Frame,
    FrontendPort,
    PeerId,
    PortState,
    Transport,
)
from tllm_core.errors import PortClosed, PortDown, PortFull, TransportError


class InprocSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """queue_frames: frames that one receiver may be behind before its senders get PortFull."""

    queue_frames: Annotated[int, Meta(ge=1, le=1 << 20)] = 16384


class Inbox:
    """What one port has yet to receive. Everything that is there is taken at once, by swapping the list."""

    __slots__ = ("_capacity", "_closed", "_frames", "_ready", "_woken")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: list[Frame] = []
        self._ready = threading.Condition(threading.Lock())
        self._woken = False
        self._closed = False

    def put(self, frame: Frame) -> None:
        with self._ready:
            if self._closed:
                raise PortDown("the other end of the inproc port was closed")
            if len(self._frames) >= self._capacity:
                raise PortFull(f"the receiver is {self._capacity} frames behind (queue_frames)")
            self._frames.append(frame)
            self._ready.notify()

    def take(self, timeout: float | None) -> list[Frame]:
        with self._ready:
            if not (self._frames or self._woken or self._closed):
                self._ready.wait_for(lambda: self._frames or self._woken or self._closed, timeout)
            if self._closed:
                raise PortClosed("this inproc port was closed")
            self._woken = False
            frames, self._frames = self._frames, []
            return frames

    def wake(self) -> None:
        with self._ready:
            self._woken = True
            self._ready.notify()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._frames = []
            self._ready.notify_all()


class Meeting:
    """One engine generation of this process: its inbox while it listens, and its frontends' by peer."""

    __slots__ = ("engine", "frontends")

    def __init__(self) -> None:
        self.engine: Inbox | None = None
        self.frontends: dict[PeerId, Inbox] = {}


class Meetings:
    """All engine generations that this process listens or connects to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listening: dict[str, int] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}

    def listen(self, engine: str, generation: int, inbox: Inbox) -> Meeting:
        with self._lock:
            if engine in self._listening:
                raise TransportError(f"engine {engine!r} is already listening in this process; choose another name")
            meeting = self._meetings.setdefault((engine, generation), Meeting())
            self._listening[engine] = generation
            meeting.engine = inbox
            return meeting

    def connect(self, engine: str, generation: int, peer: PeerId, inbox: Inbox) -> Meeting:
        with self._lock:
            meeting = self._meetings.setdefault((engine, generation), Meeting())
            if peer in meeting.frontends:
                raise TransportError(f"peer {peer.hex()} is already connected to engine {engine!r}")
            meeting.frontends[peer] = inbox
            return meeting

    def leave(self, engine: str, generation: int, peer: PeerId | None) -> None:
        """The engine (`peer` None) or one of its frontends goes; the last one to leave frees the meeting."""
        with self._lock:
            meeting = self._meetings[engine, generation]
            if peer is None:
                meeting.engine = None
                del self._listening[engine]
            else:
                del meeting.frontends[peer]
            if meeting.engine is None and not meeting.frontends:
                del self._meetings[engine, generation]


_meetings = Meetings()
# A lock that another thread held at the fork would stay locked in the child, and the engines of the parent aren't there.
os.register_at_fork(after_in_child=_meetings.__init__)  # type: ignore[misc]


class _Receiving:
    """The half that both ends share; mixed into the ports."""

    def __init__(self, engine: str, generation: int, peer: PeerId | None, inbox: Inbox) -> None:
        self._engine, self._generation, self._peer = engine, generation, peer
        self._inbox = inbox
        self._closing = threading.Lock()
        self._closed_at: float | None = None

    def path_ok_at(self) -> float:
        return time.monotonic()

    def receive(self, timeout: float | None) -> list[Frame]:
        return self._inbox.take(timeout)

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        with self._closing:
            if self._closed_at is not None:
                return
            self._closed_at = time.monotonic()
        self._inbox.close()
        _meetings.leave(self._engine, self._generation, self._peer)

    def _closed_state(self) -> PortState | None:
        if self._closed_at is None:
            return None
        return PortState(False, "closed", self._closed_at, closed=True)

    def _check_open(self) -> None:
        if self._closed_at is not None:
            raise PortClosed("this inproc port was closed")


class InprocEnginePort(_Receiving, EnginePort):
    """The engine's end."""

    def __init__(self, engine: str, generation: int, inbox: Inbox) -> None:
        super().__init__(engine, generation, None, inbox)
        self._frontends = _meetings.listen(engine, generation, inbox).frontends
        self.address = EngineAddress(
            transport=InprocTransport.name,
            engine=engine,
            generation=generation,
            endpoints={"process": str(os.getpid())},
        )

    @property
    def state(self) -> PortState:
        return self._closed_state() or PORT_UP

    def send(self, to: PeerId, frame: Frame) -> None:
        self._check_open()
        inbox = self._frontends.get(to)
        if inbox is None:
            raise PortDown(f"no frontend {to.hex()} is connected")
        inbox.put(frame)


class InprocFrontendPort(_Receiving, FrontendPort):
    """A frontend's end. It may be there before the engine is."""

    def __init__(self, address: EngineAddress, peer: PeerId, inbox: Inbox) -> None:
        super().__init__(address.engine, address.generation, peer, inbox)
        self._meeting = _meetings.connect(address.engine, address.generation, peer, inbox)

    @property
    def state(self) -> PortState:
        closed = self._closed_state()
        if closed is not None:
            return closed
        return PORT_UP if self._meeting.engine is not None else PortState(False, "the engine does not listen")

    def send(self, frame: Frame) -> None:
        self._check_open()
        inbox = self._meeting.engine
        if inbox is None:
            raise PortDown(f"engine {self._engine!r} of this generation does not listen in this process")
        inbox.put(frame)


class InprocTransport(Transport):
    """Engine and frontends in one process; the items of a frame after the first may be any object."""

    name: ClassVar[str] = "inproc"
    settings_type: ClassVar[type[Struct]] = InprocSettings
    capabilities: ClassVar[Capability] = Capability.MANY_FRONTENDS | Capability.RELIABLE
    settings: InprocSettings

    def listen(self, engine: str, generation: int) -> InprocEnginePort:
        return InprocEnginePort(engine, generation, Inbox(self.settings.queue_frames))

    def connect(self, engine: EngineAddress, peer: PeerId) -> InprocFrontendPort:
        process = engine.endpoints.get("process")
        if process != str(os.getpid()):
            raise TransportError(
                f"engine {engine.engine!r} listens in process {process}, and inproc does not leave its process; use zmq"
            )
        return InprocFrontendPort(engine, peer, Inbox(self.settings.queue_frames))
