"""An address that was advertised and can't be reached: said early where the system says so, and always with what to check."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from tllm_core import GenerationExecutor
from tllm_core.attach import read_attach_file, write_attach_file
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.errors import TransportError
from tllm_core.transports.zmq import ZmqSettings, ZmqTransport, path

PATIENCE_S = 30.0
PEER = b"\x01" * 16
MEET_S = "tllm_core.transports.zmq.transport.MEET_S"


@pytest.fixture
def lane() -> Iterator[ZmqTransport]:
    with tempfile.TemporaryDirectory(prefix="tllm") as directory:
        yield ZmqTransport(ZmqSettings(directory=directory, protocol="tcp"))


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port of this host where nobody listens; an engine may."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def address_of(host: str, port: int) -> EngineAddress:
    return EngineAddress(transport="zmq", engine="model", generation=1, endpoints={"zmq": f"tcp://{host}:{port}"})


def test_where_nobody_listens_connecting_says_so_early_with_the_address_and_what_to_check(
    lane: ZmqTransport, nobody: int
) -> None:
    words = rf"tcp://127\.0\.0\.1:{nobody}: Connection refused; check that it runs.*advertise_host.*firewall"
    with pytest.raises(TransportError, match=words):
        lane.connect(address_of("127.0.0.1", nobody), PEER)


def test_a_name_that_nobody_has_is_said_early(lane: ZmqTransport) -> None:
    with pytest.raises(TransportError, match=r"tcp://no-such-host\.invalid:5555: .+; check .*advertise_host"):
        lane.connect(address_of("no-such-host.invalid", 5555), PEER)


def test_an_attach_to_an_advertised_address_that_is_refused_ends_early(nobody: int, tmp_path: Path) -> None:
    with GenerationExecutor.create(engine="echo", transport_options={"protocol": "tcp"}) as executor:
        content = executor.write_attach_file(tmp_path / "engine.json")
        elsewhere = msgspec.structs.replace(content, address=_moved(content.address, nobody))
        write_attach_file(tmp_path / "elsewhere.json", elsewhere)
        assert read_attach_file(tmp_path / "elsewhere.json").address != content.address
        began = time.monotonic()
        with pytest.raises(TransportError, match=f"127.0.0.1:{nobody}: Connection refused.*advertise_host"):
            GenerationExecutor.attach(tmp_path / "elsewhere.json", timeout=600)
        assert time.monotonic() - began < PATIENCE_S


def _moved(address: EngineAddress, port: int) -> EngineAddress:
    return msgspec.structs.replace(address, endpoints={"zmq": f"tcp://127.0.0.1:{port}"})


def test_an_engine_that_listens_a_moment_later_is_met(
    monkeypatch: pytest.MonkeyPatch, lane: ZmqTransport, nobody: int
) -> None:
    monkeypatch.setattr(MEET_S, PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(lane.connect, address_of("127.0.0.1", nobody), PEER)
        with pytest.raises(TimeoutError):
            connecting.result(0.3)
        settings = msgspec.structs.replace(lane.settings, port=nobody)
        with contextlib.closing(ZmqTransport(settings).listen("model", 1)) as engine:
            frontend = connecting.result(PATIENCE_S)
            frontend.send([b"hello"])
            assert [bytes(frame[0]) for frame in engine.receive(PATIENCE_S)] == [b"hello"]
            frontend.close()


def test_an_address_that_swallows_everything_is_named_in_the_state_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, lane: ZmqTransport
) -> None:
    quick = tuple((option, 300 if option == zmq.CONNECT_TIMEOUT else value) for option, value in path.TCP_OPTIONS)
    monkeypatch.setattr("tllm_core.transports.zmq.ports.TCP_OPTIONS", quick)
    monkeypatch.setattr("tllm_core.transports.zmq.reach.PROBE_S", 0.3)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        for _ in range(3):  # as many as wait to be accepted; whoever comes then hears nothing
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        frontend = stack.enter_context(contextlib.closing(lane.connect(address_of("127.0.0.1", port), PEER)))
        deadline = time.monotonic() + PATIENCE_S
        while frontend.state.up:
            assert time.monotonic() < deadline
            frontend.receive(0.05)
        assert f"127.0.0.1:{port}" in frontend.state.reason
        assert "advertise_host" in frontend.state.reason
