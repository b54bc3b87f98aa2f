"""Whether a tcp connection is there, as libzmq's own monitor tells it. An ipc connection ends with its process only."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

import zmq

from tllm_core.contracts.interfaces import PORT_UP, PortState
from tllm_core.transports.zmq.reach import unreachable

CONNECTED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.Event.DISCONNECTED)
RETRIED = int(zmq.Event.CONNECT_RETRIED)
EVENT = struct.Struct("=HI")

CONNECT_S = HANDSHAKE_S = 5.0
ATTEMPT_S = CONNECT_S + HANDSHAKE_S + 2.0
"""How long libzmq's own attempt may go without any news."""
RENEW_S, RENEW_MAX_S = 0.1, 1.0
"""How soon after the end of a connection libzmq must have said that it tries again; more where renewing did not help."""

TCP_OPTIONS = (
    # One connection of several may go silent, as when a firewall forgets it: then nothing else would end it.
    (zmq.HEARTBEAT_IVL, 2000),
    (zmq.HEARTBEAT_TIMEOUT, 6000),
    (zmq.TCP_MAXRT, 10_000),
    (zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000)),
    (zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000)),
)
"""Milliseconds."""


class EnginePath:
    """An engine's connections: always up, and each that came or went moves `since`, as what was on its way may be lost.

    To be used by one thread at a time, the one that uses the socket.
    """

    renew_at: float | None = None
    """When `update` has to be called even without news, in monotonic seconds."""

    def __init__(self, socket: zmq.Socket[bytes], events: int = CONNECTED | DISCONNECTED) -> None:
        self.state: PortState = PORT_UP
        self._socket = socket
        self._monitor = _monitor(socket, events)
        self.fd = int(self._monitor.get(zmq.FD))

    def update(self) -> bool:
        """Takes in what happened; True if a connection was lost or is back. To be called before `fd` is waited for."""
        noteworthy = False
        while self._has_news():
            event, value = EVENT.unpack_from(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            noteworthy |= self._take(event, value, time.monotonic())
        return noteworthy

    def _take(self, event: int, value: int, now: float) -> bool:
        self.state = PortState(True, "", now)
        return event == DISCONNECTED

    def _has_news(self) -> bool:
        events: Any = self._monitor.get(zmq.EVENTS)
        return bool(events & int(zmq.POLLIN))

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.monitor(None, 0)
        self._monitor.close(0)


class FrontendPath(EnginePath):
    """A frontend's one connection: down without it.

    libzmq connects again after a connection that broke, and never again after one on which it met what is no ZMTP. So a
    connection that ended is renewed here unless libzmq soon says that it tries again, and so is one that nothing comes of.

    met: there has been a connection to something that speaks ZMTP. failed: an attempt before that came to nothing.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        super().__init__(socket, CONNECTED | DISCONNECTED | RETRIED)
        self._endpoint = endpoint
        self.met = self.failed = False
        self._lost_because = f"what listens at {endpoint} does not answer as an engine does; trying again"
        self._renew_s = RENEW_S
        self.renew_at = time.monotonic() + ATTEMPT_S

    def update(self) -> bool:
        noteworthy = super().update()
        now = time.monotonic()
        if self.renew_at is None or now < self.renew_at:
            return noteworthy
        self._renew(now)
        return True

    def _take(self, event: int, value: int, now: float) -> bool:
        if event == RETRIED:
            self.renew_at = now + value / 1000 + ATTEMPT_S
            is_news = not self.met and not self.failed
            if is_news:
                self.failed = True
                self.state = PortState(False, unreachable(self._endpoint), now)
            return is_news
        noteworthy = event == DISCONNECTED or not self.state.up or not self.met
        if event == CONNECTED:
            self.met = True
            self.renew_at, self._renew_s = None, RENEW_S
            self._lost_because = "the connection is lost; reconnecting"
            self.state = PortState(True, "", now)
        else:
            self.renew_at = now + self._renew_s
            self.state = PortState(False, self._lost_because, now)
        return noteworthy

    def _renew(self, now: float) -> None:
        """What the socket still held for the old connection is lost, as the state's next `since` tells."""
        self._renew_s = min(self._renew_s * 2, RENEW_MAX_S)
        self.renew_at = now + ATTEMPT_S
        self.state = PortState(False, self._lost_because, now)
        with contextlib.suppress(zmq.ZMQError):  # it may have been forgotten
            self._socket.disconnect(self._endpoint)
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError:  # out of descriptors or memory
            self.renew_at = now + self._renew_s


def _monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    where = f"inproc://monitor-{int(socket.get(zmq.FD))}"
    socket.monitor(where, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    # libzmq's thread would wait for room, and every connection with it, where nobody receives for a while.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(where)
    return monitor
