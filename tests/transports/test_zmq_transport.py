"""What is zmq's own: files and names, tcp ports, sizes, other processes, exits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings

from tllm_core.conformance.proxy import CutProxy
from tllm_core.contracts.interfaces import EngineAddress, Port
from tllm_core.errors import ConfigError, FrameTooLarge, PortClosed, TransportError
from tllm_core.transports.zmq import ZmqSettings, ZmqTransport, packing, ports

PATIENCE_S = 20.0
PEER = b"\x01" * 16


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because a socket's path may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="tllm") as parent:
        yield Path(parent, "sockets")


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """A failed test must not fail the next one."""
    yield
    for port in list(ports._open_ports):
        port.close()


def transport(directory: Path, **options: Any) -> ZmqTransport:
    return ZmqTransport(ZmqSettings(directory=str(directory), **options))


def all_received(port: Port, count: int) -> list[list[bytes]]:
    frames: list[list[bytes]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(frames) < count:
        assert time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
        frames += [[bytes(part) for part in frame] for frame in port.receive(1.0)]
    return frames


def received(port: Port) -> list[bytes]:
    """The next frame, where only one is on its way."""
    (frame,) = all_received(port, 1)
    return frame


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )


@contextlib.contextmanager
def ended(child: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


# --------------------------------------------------------------------------------------------- files and names

HOLDER = """
import sys
from tllm_core.transports.zmq import ZmqSettings, ZmqTransport
port = ZmqTransport(ZmqSettings(directory=sys.argv[1])).listen("model", 7)
print(port.address.endpoints["zmq"], flush=True)
sys.stdin.read()
port.close()
"""


def test_sockets_are_for_this_user_alone_and_gone_after_close(directory: Path) -> None:
    port = transport(directory).listen("model", 0xABC)
    path = directory / "model.0000000000000abc.sock"
    assert port.address.endpoints == {"zmq": f"ipc://{path}"}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    port.close()
    assert list(directory.iterdir()) == []


def test_the_default_directory_is_private(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory.parent))
    default = directory.parent / "tllm-core"
    port = ZmqTransport(ZmqSettings()).listen("model", 1)
    assert stat.S_IMODE(default.stat().st_mode) == 0o700
    port.close()
    default.chmod(0o777)
    with pytest.raises(ConfigError, match=r"only this user.*transport\.zmq\.directory"):
        ZmqTransport(ZmqSettings()).listen("model", 1)


@pytest.mark.parametrize("mode", [0o777, 0o703, 0o722])
def test_a_chosen_directory_that_others_can_change_is_refused_in_words(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=r"written to by every user.*chmod o-w.*set transport\.zmq\.directory"):
        transport(directory).listen("model", 7)
    assert list(directory.iterdir()) == []
    directory.chmod(mode | stat.S_ISVTX)  # as /tmp is: everybody may add, and nobody replace
    transport(directory).listen("model", 7).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give a directory away")
def test_a_chosen_directory_of_another_user_is_refused_in_words(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, 65534, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user \(65534\).*set transport\.zmq\.directory"):
        transport(directory).listen("model", 7)
    assert list(directory.iterdir()) == []


def test_a_chosen_directory_that_is_a_file_is_refused_in_words(directory: Path) -> None:
    directory.write_text("")
    with pytest.raises(ConfigError, match=r"directory .* can't be made|is not a directory"):
        transport(directory).listen("model", 7)


NAMES = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="./%~\0\\ \n-", max_size=30),
    st.text(alphabet=st.characters(codec=None), max_size=8),
    st.text(alphabet="aä\U0001f600", min_size=60, max_size=300),
    st.sampled_from(["", ".", "..", "a.lock", "a.0123456789abcdef.sock", "../x", "/etc/x", "%2e%2e", "\udcff"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES, protocol=st.sampled_from(["ipc", "tcp"]))
def test_any_name_is_held_within_the_directory_or_refused_in_words(directory: Path, name: str, protocol: str) -> None:
    around = set(directory.parent.iterdir()) - {directory}
    port = None
    with contextlib.suppress(ConfigError):  # anything else is a failure
        port = transport(directory, protocol=protocol).listen(name, 7)
    if port is not None:
        with contextlib.closing(port):
            assert port.address.engine == name
            with pytest.raises(TransportError, match="already running"):
                transport(directory, protocol=protocol).listen(name, 8)
    assert set(directory.parent.iterdir()) - {directory} == around
    assert not directory.exists() or list(directory.iterdir()) == []


def test_a_live_holder_in_another_process_is_refused_and_keeps_its_socket(directory: Path) -> None:
    with ended(python(HOLDER, str(directory))) as holder:
        endpoint = line_of(holder)
        files = sorted(path.name for path in directory.iterdir())
        with pytest.raises(TransportError, match=r"model.*already running"):
            transport(directory).listen("model", 8)
        assert sorted(path.name for path in directory.iterdir()) == files
        assert Path(endpoint.removeprefix("ipc://")).is_socket()
        holder.communicate("", timeout=PATIENCE_S)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("name", ["model", "another"])
def test_files_of_a_killed_holder_do_not_block_a_start_and_are_removed(directory: Path, name: str) -> None:
    with ended(python(HOLDER, str(directory))) as holder:
        line_of(holder)
        holder.send_signal(signal.SIGKILL)
        holder.wait(PATIENCE_S)
    assert len(list(directory.iterdir())) == 2
    port = transport(directory).listen(name, 8)
    assert sorted(path.name for path in directory.iterdir()) == [f"{name}.0000000000000008.sock", f"{name}.lock"]
    port.close()


def test_the_socket_of_a_live_engine_survives_although_its_lock_file_was_cleaned_up(directory: Path) -> None:
    engine = transport(directory).listen("model", 1)
    (directory / "model.lock").unlink()
    transport(directory).listen("another", 1).close()
    frontend = transport(directory).connect(engine.address, PEER)
    frontend.send([b"x"])
    assert received(engine) == [b"x"]
    frontend.close()
    engine.close()


def test_only_one_of_many_threads_gets_a_name(directory: Path) -> None:
    outcomes: list[object] = []

    def listen(generation: int) -> None:
        try:
            outcomes.append(transport(directory).listen("model", generation))
        except TransportError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=listen, args=(generation,)) for generation in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    ports = [outcome for outcome in outcomes if isinstance(outcome, Port)]
    assert (len(ports), len(outcomes)) == (1, 8)
    ports[0].close()
    assert list(directory.iterdir()) == []


def test_a_name_with_slashes_and_dots_stays_in_the_directory(directory: Path) -> None:
    port = transport(directory).listen("../org/model v1", 1)
    assert len(list(directory.iterdir())) == 2
    port.close()


def test_a_path_that_is_too_long_names_the_limit_and_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{zmq.IPC_PATH_MAX_LEN}.*transport\.zmq\.directory"):
        transport(tmp_path / ("d" * 100)).listen("model", 1)


def test_a_directory_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.*transport\.zmq\.directory"):
        transport(tmp_path / "file" / "sockets").listen("model", 1)


def test_a_name_that_no_file_can_have_names_the_way_out(directory: Path) -> None:
    with pytest.raises(ConfigError, match="choose another engine name"):
        transport(directory, protocol="tcp").listen("m" * 300, 1)


# ------------------------------------------------------------------------------------------------- tcp, address


def test_a_tcp_port_in_use_names_the_setting_and_leaves_nothing(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{number}.*transport\.zmq\.port"):
            transport(directory, protocol="tcp", port=number).listen("model", 1)
    assert list(directory.iterdir()) == []


def test_tcp_listens_on_loopback_and_advertises_what_it_was_told(directory: Path) -> None:
    port = transport(directory, protocol="tcp").listen("model", 1)
    assert port.address.endpoints["zmq"].startswith("tcp://127.0.0.1:")
    port.close()
    port = transport(directory, protocol="tcp", advertise_host="node7.example").listen("model", 1)
    assert port.address.endpoints["zmq"].startswith("tcp://node7.example:")
    port.close()


def test_an_address_of_another_transport_is_refused() -> None:
    address = EngineAddress(transport="nats", engine="model", generation=1, endpoints={"nats": "nats://127.0.0.1"})
    with pytest.raises(TransportError, match="no zmq address"):
        ZmqTransport(ZmqSettings()).connect(address, PEER)


@pytest.mark.parametrize("options", [{"port": 70000}, {"protocol": "udp"}, {"high_water_frames": 0}, {"hosst": "x"}])
def test_settings_out_of_bounds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, ZmqSettings)


# -------------------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_a_frame_of_64_mb_crosses_in_both_directions(directory: Path, protocol: str) -> None:
    lane = transport(directory, protocol=protocol)
    engine = lane.listen("model", 1)
    frontend = lane.connect(engine.address, PEER)
    large = os.urandom(1 << 20) * 64
    frontend.send([b"head", large])
    assert received(engine) == [b"head", large]
    engine.send(PEER, [large, b"tail"])
    assert received(frontend) == [large, b"tail"]
    frontend.close()
    engine.close()


def test_a_frame_over_the_limit_is_refused_before_anything_is_sent(directory: Path) -> None:
    lane = transport(directory, max_frame_bytes=1 << 16)
    engine = lane.listen("model", 1)
    frontend = lane.connect(engine.address, PEER)
    with pytest.raises(FrameTooLarge, match="65537"):
        frontend.send([b"x" * 65536, b"x"])
    frontend.send([b"x" * 65536])
    assert received(engine) == [b"x" * 65536]
    frontend.close()
    engine.close()


def test_a_frame_that_is_no_buffers_is_refused_and_the_next_one_arrives_whole(directory: Path) -> None:
    lane = transport(directory)
    engine = lane.listen("model", 1)
    frontend = lane.connect(engine.address, PEER)
    for wrong in ([b"x", "text"], [b"x" * 100_000, memoryview(bytes(200_000))[::2]]):
        with pytest.raises(TypeError):
            frontend.send(wrong)
    frontend.send([b"whole"])
    assert received(engine) == [b"whole"]
    frontend.close()
    engine.close()


@pytest.mark.parametrize(
    "raw", [b"", b"\x05", b"\xff" * 10, b"\x02\x01\0\0\0\xff\xff\xff\xffx", packing.pack([b"ab"], [2])[0] + b"c"]
)
def test_what_is_no_packed_frame_comes_back_as_it_is(raw: bytes) -> None:
    assert packing.unpack(raw) == [raw]


def test_messages_of_a_stranger_are_frames_and_nothing_worse(directory: Path) -> None:
    engine = transport(directory).listen("model", 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(engine.address.endpoints["zmq"])
        stranger.send(b"")
        assert received(engine) == [b""]
        stranger.send_multipart([b"GET / HTTP/1.1", b"\xff" * 9, b""])
        assert received(engine) == [b"\xff" * 9, b""]
        stranger.send(b"\xff\xff")
        assert received(engine) == [b"\xff\xff"]
    engine.close()


def test_a_send_that_takes_in_the_readers_signal_passes_it_on(directory: Path) -> None:
    lane = transport(directory)
    engine = lane.listen("model", 1)
    frontend = lane.connect(engine.address, PEER)
    frontend.send([b"hello"])
    assert received(engine) == [b"hello"]
    assert frontend._drain(park=True) == []  # the reader is about to block
    engine.send(PEER, [b"x"])
    select.select([frontend._socket.get(zmq.FD)], [], [], PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while not select.select([frontend._wake], [], [], 0.002)[0]:
        assert time.monotonic() < deadline, "the reader would sleep on"
        frontend.send([b"noise"])  # libzmq looks at its commands once a millisecond
    assert received(frontend) == [b"x"]
    frontend.close()
    engine.close()


# ------------------------------------------------------------------------------------- processes and their ends

ECHO = """
import sys
import msgspec
from tllm_core.conformance.proxy import CutProxy
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.transports.zmq import ZmqSettings, ZmqTransport
port = ZmqTransport(ZmqSettings()).connect(msgspec.json.decode(sys.argv[1], type=EngineAddress), bytes([int(sys.argv[2])]) * 16)
port.send([b"hello", sys.argv[2].encode()])
while True:
    for frame in port.receive(None):
        if not frame:
            port.close()
            sys.exit()
        port.send(frame)
"""


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_frontends_in_other_processes(directory: Path, protocol: str) -> None:
    engine = transport(directory, protocol=protocol).listen("model", 1)
    address = msgspec.json.encode(engine.address).decode()
    with ended(python(ECHO, address, "1")) as first, ended(python(ECHO, address, "2")) as second:
        assert sorted(all_received(engine, 2)) == [[b"hello", b"1"], [b"hello", b"2"]]
        for peer in (1, 2):
            for number in range(100):
                engine.send(bytes([peer]) * 16, [b"%d" % peer, b"%d" % number])
        frames = all_received(engine, 200)
        for peer in (1, 2):
            mine = [int(number) for sender, number in frames if int(sender) == peer]
            assert mine == list(range(100))
            engine.send(bytes([peer]) * 16, [])
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    engine.close()


LONELY = """
import sys
from tllm_core.transports.zmq import ZmqSettings
from tllm_core.transports.zmq.ports import ZmqFrontendPort
port = ZmqFrontendPort(ZmqSettings(), sys.argv[1], b"\\x01" * 16)
for number in range(3):
    port.send([b"unsent"])
print("sent", flush=True)
if sys.argv[2] == "close":
    port.close()
"""


@pytest.mark.parametrize("ending", ["close", "leave"])
@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_unsent_frames_to_a_peer_that_never_existed_do_not_keep_the_process(
    directory: Path, protocol: str, ending: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    endpoint = nowhere if protocol == "tcp" else f"ipc://{directory}/nobody.sock"
    with ended(python(LONELY, endpoint, ending)) as child:
        assert line_of(child) == "sent"
        assert child.wait(2.0) == 0


def test_a_forked_child_has_no_port_and_harms_none(directory: Path) -> None:
    engine = transport(directory).listen("model", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of the fork that this is about
        child = os.fork()
    if child == 0:
        try:
            engine.send(PEER, [b"x"])
        except PortClosed:
            engine.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(TransportError, match="already running"):
        transport(directory).listen("model", 2)
    frontend = transport(directory).connect(engine.address, PEER)
    frontend.send([b"x"])
    assert received(engine) == [b"x"]
    frontend.close()
    engine.close()
    assert list(directory.iterdir()) == []


def test_a_frontend_that_comes_back_under_its_id_is_reached_again(directory: Path) -> None:
    engine = transport(directory).listen("model", 1)
    for number in range(20):
        frontend = transport(directory).connect(engine.address, PEER)
        frontend.send([b"%d" % number])
        assert received(engine) == [b"%d" % number]
        engine.send(PEER, [b"%d" % number])
        assert received(frontend) == [b"%d" % number]
        frontend.close()
    engine.close()


# ---------------------------------------------------------------------------------------------------- reconnects


def until(port: Port, condition: Callable[[], bool]) -> None:
    """Receives, so that the port sees what happens, until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        assert list(port.receive(0.05)) == []


def test_a_lost_tcp_connection_is_down_comes_back_and_shows_since_when(directory: Path) -> None:
    lane = transport(directory, protocol="tcp")
    engine = lane.listen("model", 1)
    with CutProxy("127.0.0.1", int(engine.address.endpoints["zmq"].rpartition(":")[2])) as proxy:
        address = msgspec.structs.replace(engine.address, endpoints={"zmq": f"tcp://{proxy.host}:{proxy.port}"})
        frontend = lane.connect(address, PEER)
        for number in range(3):
            frontend.send([b"up %d" % number])
            assert received(engine) == [b"up %d" % number]
            engine.send(PEER, [b"down %d" % number])
            assert received(frontend) == [b"down %d" % number]
            until(frontend, lambda: frontend.state.up and frontend.state.since > 0)
            before = frontend.state.since, engine.state.since
            proxy.cut()
            proxy.heal()
            until(frontend, lambda before=before: frontend.state.since > before[0])  # type: ignore[misc]
            until(frontend, lambda: frontend.state.up)
            until(engine, lambda before=before: engine.state.since > before[1])  # type: ignore[misc]
            assert engine.state.up
        frontend.close()
    engine.close()


def test_a_blocked_receive_returns_when_the_path_changes(directory: Path) -> None:
    lane = transport(directory, protocol="tcp")
    engine = lane.listen("model", 1)
    frontend = lane.connect(engine.address, PEER)
    until(frontend, lambda: frontend.state.since > 0)
    engine.close()
    assert list(frontend.receive(PATIENCE_S)) == []
    assert not frontend.state.up
    assert "reconnecting" in frontend.state.reason
    frontend.close()


def test_discard_removes_what_a_dead_engine_left(directory: Path) -> None:
    script = (
        "import os, sys\n"
        "from tllm_core.transports.zmq import ZmqSettings, ZmqTransport\n"
        "ZmqTransport(ZmqSettings(directory=sys.argv[1])).listen('gone', 7)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, timeout=60)
    assert len(list(directory.iterdir())) == 2
    address = EngineAddress(transport="zmq", engine="gone", generation=7, endpoints={})
    transport(directory).discard(address)
    assert not list(directory.iterdir())
    transport(directory).discard(address)


def test_discard_leaves_a_live_engine_alone(directory: Path) -> None:
    port = transport(directory).listen("alive", 7)
    files = sorted(directory.iterdir())
    for generation in (7, 8):
        transport(directory).discard(
            EngineAddress(transport="zmq", engine="alive", generation=generation, endpoints={})
        )
    assert sorted(directory.iterdir()) == files
    port.close()
