"""Both ends of a zmq lane: a ROUTER at the engine, a DEALER with the peer's id at each frontend, one connection between them.

One socket carries both directions, so an engine that has received from a peer can answer it; with a socket per direction the
first answer would race with the second connection. libzmq's sockets take one thread at a time: every use is under `_lock`,
and the one reader waits outside of it, in a poll of the socket's descriptor and of a wake-up descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import Any

import zmq

from tllm_core.contracts.interfaces import (
    PORT_UP,
    EnginePort,
    Frame,
    FrontendPort,
    PeerId,
    PortState,
)
from tllm_core.errors import FrameTooLarge, PortClosed, PortDown, PortFull
from tllm_core.transports.zmq.names import HeldName
from tllm_core.transports.zmq.packing import TABLE_BYTES, measure, pack, unpack
from tllm_core.transports.zmq.path import TCP_OPTIONS, EnginePath, FrontendPath
from tllm_core.transports.zmq.settings import ZmqSettings
from tllm_core.transports.zmq.wake import Wake

# Plain integers: an operation on zmq's enum members costs more than a send.
LAST, MORE, READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)

BATCH_FRAMES = 256
"""Frames that one `receive` takes before senders of the same port get their turn."""

_open_ports: weakref.WeakSet[_SocketPort] = weakref.WeakSet()


def _disown_all() -> None:
    for port in list(_open_ports):
        port.disown()


os.register_at_fork(after_in_child=_disown_all)


class _SocketPort:
    """The half that both ends share; mixed into the ports. It owns its context, so that closing it leaves nothing behind."""

    _routed = False
    """Messages start with the peer's id."""

    def __init__(self, kind: zmq.SocketType, settings: ZmqSettings) -> None:
        self.max_frame: int | None = settings.max_frame_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = _configure(self._context.socket(kind), settings)
        self._wake = Wake()
        self._woken = False
        self._parked = False
        self._closed_at: float | None = None
        self._freed = False
        self._lock = threading.Lock()
        self._reader = threading.Lock()
        self._poll = select.poll()
        self._fd = int(self._socket.get(zmq.FD))
        self._poll.register(self._fd, select.POLLIN)
        self._wake_fd = self._wake.fileno()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._path: EnginePath | None = None
        _open_ports.add(self)

    def _watch(self, path: EnginePath) -> None:
        """For tcp, before the socket binds or connects."""
        for option, value in TCP_OPTIONS:
            self._socket.setsockopt(option, value)
        self._path = path
        self._poll.register(path.fd, select.POLLIN)

    @property
    def state(self) -> PortState:
        if self._closed_at is None:
            return PORT_UP if self._path is None else self._path.state
        return PortState(False, "closed", self._closed_at, closed=True)

    def path_ok_at(self) -> float:
        return time.monotonic()

    def wake(self) -> None:
        self._woken = True
        self._wake.set()

    # ------------------------------------------------------------------------------------------------ receive

    def receive(self, timeout: float | None) -> list[Frame]:
        deadline = None if timeout is None else time.monotonic() + timeout
        polled = False
        with self._reader:
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                park = left is None or left > 0
                frames = self._drain(park, polled)
                if frames or self._take_wake() or not park:
                    return frames
                polled = False
                for fd, _ in self._poll.poll(self._patience_ms(left)):
                    if fd == self._fd:
                        polled = True
                    elif fd == self._wake_fd:
                        self._wake.clear()

    def _patience_ms(self, left_s: float | None) -> float | None:
        renew_at = None if self._path is None else self._path.renew_at
        if renew_at is not None:
            renew_s = max(0.0, renew_at - time.monotonic())
            left_s = renew_s if left_s is None else min(left_s, renew_s)
        return None if left_s is None else left_s * 1000

    def _take_wake(self) -> bool:
        if not self._woken:
            return False
        self._woken = False
        return True

    def _drain(self, park: bool, polled: bool = False) -> list[Frame]:
        """Takes what is there. Where nothing is and `park`, the caller goes into the poll, from which senders may wake it.

        A connection that was lost, renewed or is back counts as a wake-up, so that the caller looks at `state`. (Renewing
        it also may have taken in the command that was to wake the reader.)
        """
        frames: list[Frame] = []
        with self._lock:
            self._parked = False
            self._check_open()
            if polled:  # a message is likely, and asking for the events costs more than taking it
                with contextlib.suppress(zmq.Again):
                    frames.append(self._take_message())
            # Asking for the events also takes in the socket's pending commands; only after a "no" is its descriptor armed.
            while len(frames) < BATCH_FRAMES and self._readable():
                frames.append(self._take_message())
            if self._path is not None and not frames and self._path.update():
                self._woken = True
            self._parked = park and not frames
            if frames:
                self._woken = False
        return frames

    def _readable(self) -> bool:
        events: Any = self._socket.get(zmq.EVENTS)
        return bool(events & READABLE)

    def _take_message(self) -> Frame:
        socket = self._socket
        if self._routed:
            socket.recv(LAST)
        first = socket.recv(LAST)
        # Where there is an id before each message, a stranger's further parts must not be taken for the next message.
        if (first and not self._routed) or not socket.get(zmq.RCVMORE):
            return unpack(first)
        parts: list[Frame] = []
        while socket.get(zmq.RCVMORE):
            parts.append(socket.recv(LAST, copy=False).buffer)
        return parts

    # --------------------------------------------------------------------------------------------------- send

    def _send(self, frame: Frame, to: PeerId | None) -> None:
        sizes = measure(frame)
        if self.max_frame is not None and sum(sizes) > self.max_frame:
            raise FrameTooLarge(
                f"a frame of {sum(sizes)} bytes is over the limit of {self.max_frame} (max_frame_bytes)"
            )
        parts = pack(frame, sizes)
        if to is not None:
            parts.insert(0, to)
        last = parts.pop()
        with self._lock:
            self._check_open()
            try:
                for part in parts:
                    self._socket.send(part, MORE)
                self._socket.send(last, LAST)
            except zmq.Again:
                raise PortFull("the peer is too far behind (high_water_frames)") from None
            except zmq.ZMQError as error:
                raise PortDown(f"the peer can't be reached: {error}") from None
            # Sending may have taken in the command that was to wake the reader.
            if self._parked and self._readable():
                self._wake.set()

    # -------------------------------------------------------------------------------------------------- close

    def close(self) -> None:
        with self._lock:
            if self._closed_at is None:
                self._closed_at = time.monotonic()
        self._wake.set()
        with self._reader:
            if not self._freed:
                self._freed = True
                self._free()

    def _free(self) -> None:
        with self._lock:
            if self._path is not None:
                self._path.close()
            self._socket.close()
        self._wake.close()
        self._context.term()  # waits for what lingers
        _open_ports.discard(self)

    def disown(self) -> None:
        """In a forked child: the port is the parent's, and this copy of it only says so."""
        self._lock, self._reader = threading.Lock(), threading.Lock()
        self._closed_at, self._freed = time.monotonic(), True
        self._wake.disown()

    def _check_open(self) -> None:
        if self._closed_at is not None:
            raise PortClosed("this zmq port was closed")


def _configure(socket: zmq.Socket[bytes], settings: ZmqSettings) -> zmq.Socket[bytes]:
    for option, value in (
        (zmq.LINGER, int(settings.linger_s * 1000)),
        (zmq.SNDHWM, settings.high_water_frames),
        (zmq.RCVHWM, settings.high_water_frames),
        (zmq.MAXMSGSIZE, settings.max_frame_bytes + TABLE_BYTES),
        (zmq.RECONNECT_IVL, max(1, int(settings.reconnect_s * 1000))),
        (zmq.RECONNECT_IVL_MAX, max(1000, int(settings.reconnect_s * 1000))),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    return socket


class ZmqEnginePort(_SocketPort, EnginePort):
    """The engine's end. Owns the engine's name; its `address` is set after `bind`."""

    _routed = True

    def __init__(self, settings: ZmqSettings, held: HeldName) -> None:
        super().__init__(zmq.ROUTER, settings)
        self._held = held
        if settings.protocol == "tcp":
            self._watch(EnginePath(self._socket))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer whose connection broke unnoticed on this side comes back under the same id.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)

    def bind(self, endpoint: str) -> str:
        """Binds and returns what was bound; raises zmq.ZMQError."""
        with self._lock:
            self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
            self._socket.bind(endpoint)
            bound: Any = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return str(bytes(bound).rstrip(b"\0"), "utf-8")

    def send(self, to: PeerId, frame: Frame) -> None:
        self._send(frame, to)

    def _free(self) -> None:
        super()._free()
        self._held.release()

    def disown(self) -> None:
        super().disown()
        self._held.disown()


class ZmqFrontendPort(_SocketPort, FrontendPort):
    """A frontend's end. It may be there before the engine is; what is sent meanwhile waits."""

    _first_path: FrontendPath | None = None

    def __init__(self, settings: ZmqSettings, endpoint: str, peer: PeerId) -> None:
        super().__init__(zmq.DEALER, settings)
        try:
            if endpoint.startswith("tcp:"):
                self._watch(path := FrontendPath(self._socket, endpoint))
                self._first_path = path
            self._socket.setsockopt(zmq.ROUTING_ID, peer)
            self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def meet(self, timeout: float) -> bool:
        """Waits for the first connection. False where attempts at it came to nothing for all that time: then somebody has said
        so. Before the first `receive` of others."""
        path, deadline = self._first_path, time.monotonic() + timeout
        while path is not None and not path.met and (left := deadline - time.monotonic()) > 0:
            self.receive(left)  # nothing is sent to a frontend that has not spoken yet
        return path is None or path.met or not path.failed

    def send(self, frame: Frame) -> None:
        self._send(frame, None)
