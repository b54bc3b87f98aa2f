"""What this transport promises beyond the contract: who may connect, and what becomes of files."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tllm_transport_unix import UnixSettings, UnixTransport

from tllm_core.contracts.interfaces import EnginePort, FrontendPort
from tllm_core.errors import ConfigError, TransportError

PEER = b"\x01" * 16
LISTENS_AND_IS_KILLED = """
import os, signal, sys
from tllm_transport_unix import UnixSettings, UnixTransport
port = UnixTransport(UnixSettings(directory=sys.argv[1])).listen("engine", 1)
print(port.address.endpoints["path"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Shorter than pytest's own, because the paths of sockets are limited to about 100 bytes."""
    path = Path(tempfile.mkdtemp(prefix="tllm-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def transport(directory: Path) -> UnixTransport:
    return UnixTransport(UnixSettings(directory=str(directory)))


@pytest.fixture
def ends(transport: UnixTransport) -> Iterator[tuple[EnginePort, FrontendPort]]:
    engine = transport.listen("engine", 2)
    frontend = transport.connect(engine.address, PEER)
    yield engine, frontend
    frontend.close()
    engine.close()


def left_by_a_killed_engine(directory: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", LISTENS_AND_IS_KILLED, directory],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    path = Path(done.stdout.strip())
    assert path.is_socket(), done.stderr
    return path


def test_only_this_user_can_connect(ends: tuple[EnginePort, FrontendPort]) -> None:
    path = Path(ends[0].address.endpoints["path"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_directory_that_others_can_use_is_refused_by_name(directory: Path, transport: UnixTransport) -> None:
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match=f"{directory}.*chmod 700.*transport.unix.directory"):
        transport.listen("engine", 1)


def test_the_file_of_a_killed_engine_is_replaced_by_the_next_one(directory: Path, transport: UnixTransport) -> None:
    left = left_by_a_killed_engine(directory)
    port = transport.listen("engine", 2)
    assert [str(path) for path in directory.iterdir()] == [port.address.endpoints["path"]]
    assert not left.exists()
    port.close()
    assert list(directory.iterdir()) == []


def test_discard_removes_what_a_dead_engine_left_and_nothing_of_a_live_one(
    directory: Path, transport: UnixTransport, ends: tuple[EnginePort, FrontendPort]
) -> None:
    left = directory / "another.0000000000000001.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    transport.discard(ends[0].address)
    assert not left.exists()
    assert Path(ends[0].address.endpoints["path"]).is_socket()


def test_a_name_that_begins_like_that_of_a_live_engine_is_free(
    transport: UnixTransport, ends: tuple[EnginePort, FrontendPort]
) -> None:
    longer = transport.listen("engine.b", 1)
    shorter = transport.listen("eng", 1)
    shorter.close()
    longer.close()


def test_a_path_that_is_too_long_is_told_with_the_setting_that_shortens_it(transport: UnixTransport) -> None:
    with pytest.raises(ConfigError, match=r"transport\.unix\.directory"):
        transport.listen("x" * 200, 1)


def test_nobody_listening_is_told_at_once(transport: UnixTransport) -> None:
    engine = transport.listen("engine", 1)
    engine.close()
    with pytest.raises(TransportError, match="can't reach engine 'engine'"):
        transport.connect(engine.address, PEER)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x02\0\0\0\x01x", b"\x01\0\0\0\0"])
def test_a_stranger_who_says_something_else_is_hung_up_on_alone(
    ends: tuple[EnginePort, FrontendPort], said: bytes
) -> None:
    engine, frontend = ends
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20.0)
        stranger.connect(engine.address.endpoints["path"])
        stranger.sendall(said)
        frames: list[bytes] = []
        frontend.send([b"fine"])
        while not frames:
            frames += [bytes(frame[0]) for frame in engine.receive(0.1)]
        engine.receive(0.1)
        assert stranger.recv(1) == b""
    assert frames == [b"fine"]
    engine.send(PEER, [b"as well"])
    assert [bytes(frame[0]) for frame in frontend.receive(20.0)] == [b"as well"]


def test_what_is_larger_than_the_kernel_s_buffer_is_sent_even_while_nothing_else_is_done(
    ends: tuple[EnginePort, FrontendPort],
) -> None:
    engine, frontend = ends
    frames = [secrets.token_bytes(2 << 20) for _ in range(3)]
    for frame in frames:
        frontend.send([frame])
    received: list[bytes] = []
    while len(received) < len(frames):
        arrived = engine.receive(20.0)
        assert arrived, "it stays with the sender"
        received += [bytes(frame[0]) for frame in arrived]
    assert received == frames


def test_close_goes_on_sending_for_as_long_as_it_was_told_to(directory: Path) -> None:
    transport = UnixTransport(UnixSettings(directory=str(directory), linger_s=30.0))
    with contextlib.closing(transport.listen("engine", 1)) as engine:
        frontend = transport.connect(engine.address, PEER)
        frames = [secrets.token_bytes(2 << 20) for _ in range(3)]
        for frame in frames:
            frontend.send([frame])
        closing = threading.Thread(target=frontend.close)
        closing.start()
        received: list[bytes] = []
        while arrived := engine.receive(20.0):
            received += [bytes(frame[0]) for frame in arrived]
            if len(received) == len(frames):
                break
        closing.join(20.0)
        assert not closing.is_alive()
    assert received == frames


def test_close_does_not_wait_for_a_peer_that_never_reads(directory: Path) -> None:
    transport = UnixTransport(UnixSettings(directory=str(directory), linger_s=0.1))
    with contextlib.closing(transport.listen("engine", 1)) as engine:
        frontend = transport.connect(engine.address, PEER)
        frontend.send([bytes(4 << 20)])
        closing = threading.Thread(target=frontend.close, daemon=True)
        closing.start()
        closing.join(20.0)
        assert not closing.is_alive()
        assert frontend.state.closed
