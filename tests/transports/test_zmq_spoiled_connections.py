"""Tcp connections on which something came that is no ZMTP: libzmq gives those up for good, and the port makes them anew."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tllm_core.conformance.proxy import CutProxy
from tllm_core.contracts.interfaces import EngineAddress, Port
from tllm_core.errors import PortDown, PortFull
from tllm_core.transports.zmq import ZmqSettings, ZmqTransport, path
from tllm_core.transports.zmq.ports import ZmqEnginePort, ZmqFrontendPort

PATIENCE_S = 30.0
PEER = b"\x01" * 16


@pytest.fixture
def lane() -> Iterator[ZmqTransport]:
    with tempfile.TemporaryDirectory(prefix="tllm") as directory:
        yield ZmqTransport(ZmqSettings(directory=directory, protocol="tcp"))


@pytest.fixture
def engine(lane: ZmqTransport) -> Iterator[ZmqEnginePort]:
    with contextlib.closing(lane.listen("model", 1)) as engine:
        yield engine


@pytest.fixture
def proxy(engine: ZmqEnginePort) -> Iterator[CutProxy]:
    with CutProxy("127.0.0.1", port_of(engine)) as proxy:
        yield proxy


@pytest.fixture
def frontend(lane: ZmqTransport, engine: ZmqEnginePort, proxy: CutProxy) -> Iterator[ZmqFrontendPort]:
    with contextlib.closing(lane.connect(address_of(proxy.port), PEER)) as frontend:
        meet(engine, frontend)
        yield frontend


def port_of(engine: ZmqEnginePort) -> int:
    return int(engine.address.endpoints["zmq"].rpartition(":")[2])


def address_of(port: int) -> EngineAddress:
    return EngineAddress(transport="zmq", engine="model", generation=1, endpoints={"zmq": f"tcp://127.0.0.1:{port}"})


def until(condition: Callable[[], bool], *readers: Port) -> None:
    """Receives, so that the ports see what happens, until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        for port in readers:
            port.receive(0.01)


def meet(engine: ZmqEnginePort, frontend: ZmqFrontendPort) -> None:
    """A frame of each side reaches the other; those before it may be lost."""
    word = b"%d" % time.monotonic_ns()
    deadline = time.monotonic() + PATIENCE_S
    reached = False
    while not reached:
        assert time.monotonic() < deadline, frontend.state
        with contextlib.suppress(PortFull, PortDown):
            frontend.send([b"up", word])
        reached = any(frame == [b"up", word] for frame in flat(engine, frontend))
    while True:
        assert time.monotonic() < deadline, frontend.state
        with contextlib.suppress(PortFull, PortDown):
            engine.send(PEER, [b"down", word])
        if any(frame == [b"down", word] for frame in flat(frontend, engine)):
            return


def flat(reader: Port, other: Port) -> list[list[bytes]]:
    other.receive(0)
    return [[bytes(part) for part in frame] for frame in reader.receive(0.02)]


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_a_connection_that_ends_with_spoiled_bytes_from_the_engine_is_made_anew(
    engine: ZmqEnginePort, proxy: CutProxy, frontend: ZmqFrontendPort, count: int
) -> None:
    before = frontend.state
    proxy.corrupt(count)
    engine.send(PEER, [b"x" * 150])
    # By `since` the lane knows that it has to send again.
    until(lambda: frontend.state.since > before.since and frontend.state.up, frontend, engine)
    meet(engine, frontend)


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_a_connection_that_the_engine_ends_for_spoiled_bytes_is_made_anew(
    engine: ZmqEnginePort, proxy: CutProxy, frontend: ZmqFrontendPort, count: int
) -> None:
    before = frontend.state, engine.state
    proxy.corrupt(count)
    frontend.send([b"x" * 150])
    until(lambda: frontend.state.since > before[0].since and frontend.state.up, frontend, engine)
    until(lambda: engine.state.since > before[1].since, engine, frontend)
    meet(engine, frontend)


@pytest.mark.parametrize("count", [1, 10, 11, 40, 100])
def test_a_spoiled_handshake_is_tried_again(
    engine: ZmqEnginePort, proxy: CutProxy, frontend: ZmqFrontendPort, count: int
) -> None:
    proxy.cut()
    until(lambda: not frontend.state.up, frontend, engine)
    proxy.corrupt(count)
    proxy.heal()
    until(lambda: frontend.state.up, frontend, engine)
    meet(engine, frontend)


def test_a_connection_that_breaks_is_left_to_libzmq(
    monkeypatch: pytest.MonkeyPatch, engine: ZmqEnginePort, proxy: CutProxy, frontend: ZmqFrontendPort
) -> None:
    renewed: list[float] = []
    monkeypatch.setattr(path.FrontendPath, "_renew", lambda self, now: renewed.append(now))
    for _ in range(3):
        proxy.cut()
        until(lambda: not frontend.state.up, frontend, engine)
        frontend.receive(4 * path.RENEW_S)
        proxy.heal()
        until(lambda: frontend.state.up, frontend, engine)
        meet(engine, frontend)
    assert not renewed


# ----------------------------------------------------------------------------------- what listens is no engine


class Stranger:
    """Listens where an engine should be; accepts, says what it was told to say, and ends the connection if `leaves`."""

    def __init__(self, words: bytes, *, leaves: bool) -> None:
        self.accepted = 0
        self._words, self._leaves = words, leaves
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self.accepted < 0:
                connection.close()
                return
            self.accepted += 1
            self._held.append(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(self._words)
            if self._leaves:
                connection.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self.accepted = -1
            socket.create_connection(("127.0.0.1", self.port)).close()
            self._thread.join()
            for end in (self._listener, *self._held):
                end.close()


HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
SSH = b"SSH-2.0-OpenSSH_9.6\r\n"


@pytest.mark.parametrize(
    ("words", "leaves"),
    [(b"", False), (b"", True), (HTTP, True), (HTTP, False), (SSH, False), (b"\0" * 80, False)],
    ids=["silent", "leaving", "http", "http-kept", "ssh", "zeros"],
)
def test_a_stranger_behind_the_address_is_named_and_an_engine_that_takes_its_place_is_found(
    monkeypatch: pytest.MonkeyPatch, lane: ZmqTransport, words: bytes, leaves: bool
) -> None:
    _hurry(monkeypatch)
    with contextlib.closing(Stranger(words, leaves=leaves)) as stranger:
        frontend = lane.connect(address_of(stranger.port), PEER)
        with contextlib.suppress(PortFull):  # it may have been left already, and nobody is there to take it
            frontend.send([b"hello"])
        until(lambda: not frontend.state.up and stranger.accepted >= 3, frontend)
        assert f"127.0.0.1:{stranger.port}" in frontend.state.reason
        stranger.close()
        at_last = ZmqTransport(msgspec.structs.replace(lane.settings, port=stranger.port)).listen("model", 1)
        meet(at_last, frontend)
        frontend.close()
        at_last.close()


def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits for an answer, shortened."""
    shortened: list[tuple[Any, int]] = [
        (option, 300 if option == zmq.HANDSHAKE_IVL else value) for option, value in path.TCP_OPTIONS
    ]
    monkeypatch.setattr("tllm_core.transports.zmq.ports.TCP_OPTIONS", tuple(shortened))
    monkeypatch.setattr(path, "ATTEMPT_S", 0.6)


def test_thousands_of_connections_that_come_and_go_unread_hold_up_nobody(
    engine: ZmqEnginePort, proxy: CutProxy, frontend: ZmqFrontendPort
) -> None:
    for _ in range(2500):  # more than libzmq's own queue of news takes
        socket.create_connection(("127.0.0.1", port_of(engine))).close()
    frontend.send([b"after"])
    frames: list[list[bytes]] = []
    deadline = time.monotonic() + PATIENCE_S
    while [b"after"] not in frames:
        assert time.monotonic() < deadline
        frames += [[bytes(part) for part in frame] for frame in engine.receive(0.1)]
