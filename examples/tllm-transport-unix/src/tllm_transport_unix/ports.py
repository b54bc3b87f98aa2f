"""Both ends. `receive` waits for all sockets of its port at once, on the caller's own thread."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from functools import partial

from tllm_core.contracts.interfaces import (
    PORT_UP,
    EngineAddress,
    EnginePort,
    Frame,
    FrontendPort,
    PeerId,
    Port,
    PortState,
)
from tllm_core.errors import PortClosed, PortDown
from tllm_transport_unix.connection import Connection
from tllm_transport_unix.names import Name
from tllm_transport_unix.settings import UnixSettings

PEER_BYTES = 16
ACCEPT_RETRY_S = 0.01


class _UnixPort(Port):
    """The half that both ends share.

    Each socket is watched with what to call once it is readable: that appends frames, and returns True where `receive` is
    to return even without any.
    """

    state = PORT_UP

    def __init__(self, settings: UnixSettings) -> None:
        self.max_frame = settings.max_frame_bytes
        self._settings = settings
        self._connections: set[Connection] = set()
        self._lock = threading.RLock()  # a signal handler may call `wake` in a thread that is inside of it
        self._reader = threading.Lock()
        self._freed = False
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._take_wake)

    def path_ok_at(self) -> float:
        return time.monotonic()  # the kernel is the path

    def receive(self, timeout: float | None) -> list[Frame]:
        deadline = None if timeout is None else time.monotonic() + timeout
        frames: list[Frame] = []
        with self._reader:
            while True:
                self._check_open()
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                noteworthy = [key.data(frames) for key, _ in self._selector.select(left)]
                if frames or any(noteworthy) or left == 0:
                    self._check_open()
                    return frames

    def wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full: a wake-up waits already; closed: nobody receives
            self._waking.send(b"\0")

    def _take_wake(self, _: list[Frame]) -> bool:
        self._woken.recv(1 << 16)
        return True

    def _watch(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: Connection, frames: list[Frame]) -> bool:
        try:
            frames += self._admitted(connection, connection.read())
        except EOFError as error:
            self._selector.unregister(connection.socket)
            self._connections.remove(connection)
            connection.close()
            return self._lost(connection, str(error))
        return False

    def _admitted(self, connection: Connection, frames: list[Frame]) -> list[Frame]:
        return frames

    def _lost(self, connection: Connection, reason: str) -> bool:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self.state.closed:
            raise PortClosed("this unix port was closed")

    def close(self) -> None:
        with self._lock:
            if not self.state.closed:
                self.state = PortState(False, "closed", time.monotonic(), closed=True)
        self.wake()
        with self._reader:  # whoever was in `receive` has left it
            if not self._freed:
                self._freed = True
                self._free()

    def _free(self) -> None:
        deadline = time.monotonic() + self._settings.linger_s
        for connection in self._connections:
            connection.close(deadline)
        self._selector.close()
        with self._lock:
            self._waking.close()
            self._woken.close()


class UnixEnginePort(_UnixPort, EnginePort):
    """The engine's end: a listening socket, and a connection for each frontend, whose first frame is its peer's id."""

    def __init__(self, settings: UnixSettings, name: Name, address: EngineAddress) -> None:
        super().__init__(settings)
        self.address = address
        self._name = name
        self._peers: dict[PeerId, Connection] = {}
        self._selector.register(name.listener, selectors.EVENT_READ, self._accept)

    def send(self, to: PeerId, frame: Frame) -> None:
        self._check_open()
        connection = self._peers.get(to)
        if connection is None:
            raise PortDown(f"no frontend {to.hex()} is connected")
        connection.send(frame)

    def _accept(self, _: list[Frame]) -> bool:
        try:
            self._watch(Connection(self._name.listener.accept()[0], self._settings))
        except BlockingIOError:  # it left again
            pass
        except OSError:  # no descriptor is left; asking again at once would only spin
            time.sleep(ACCEPT_RETRY_S)
        return False

    def _admitted(self, connection: Connection, frames: list[Frame]) -> list[Frame]:
        if connection.peer or not frames:
            return frames
        first, *others = frames
        peer = b"".join(first)
        if len(peer) != PEER_BYTES or peer in self._peers:
            raise EOFError("this is no frontend, or one that is here already")
        connection.peer = peer
        self._peers[peer] = connection
        return others

    def _lost(self, connection: Connection, reason: str) -> bool:
        self._peers.pop(connection.peer, None)
        return False

    def _free(self) -> None:
        self._name.release()
        super()._free()


class UnixFrontendPort(_UnixPort, FrontendPort):
    """A frontend's end: one connection. It is never made anew, as nothing but the end of a process breaks it."""

    def __init__(self, settings: UnixSettings, connection: Connection, peer: PeerId) -> None:
        super().__init__(settings)
        self._connection = connection
        self._watch(connection)
        connection.send([peer])

    def send(self, frame: Frame) -> None:
        self._check_open()
        self._connection.send(frame)

    def _lost(self, connection: Connection, reason: str) -> bool:
        with self._lock:
            if not self.state.closed:
                self.state = PortState(False, reason, time.monotonic())
        return True  # so that the caller looks at `state`
