"""Whether a tcp connection is there, as libzmq's own monitor tells it. An ipc connection ends with its process only."""

from __future__ import annotations

import struct
import time
from typing import Any

import zmq

from tllm_core.contracts.interfaces import PORT_UP, PortState

CONNECTED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.Event.DISCONNECTED)
EVENT = struct.Struct("=HI")


class Path:
    """The state of one port's connections. To be used by one thread at a time, the one that uses the socket.

    A frontend has one connection and is down without it. An engine is always up; each connection that came or went moves
    its `since`, as what was on its way may be lost.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, always_up: bool) -> None:
        self.state: PortState = PORT_UP
        self._always_up = always_up
        self._socket = socket
        self._monitor = socket.get_monitor_socket(CONNECTED | DISCONNECTED)
        self.fd = int(self._monitor.get(zmq.FD))

    def update(self) -> bool:
        """Takes in what happened; True if a connection was lost or is back. To be called before `fd` is waited for."""
        noteworthy = False
        while self._has_news():
            event, *_ = EVENT.unpack_from(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            noteworthy |= event == DISCONNECTED or not self.state.up
            up = self._always_up or event == CONNECTED
            self.state = PortState(up, "" if up else "the connection is lost; reconnecting", time.monotonic())
        return noteworthy

    def _has_news(self) -> bool:
        events: Any = self._monitor.get(zmq.EVENTS)
        return bool(events & int(zmq.POLLIN))

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(0)
