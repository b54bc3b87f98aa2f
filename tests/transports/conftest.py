import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tllm_core.conformance.broker import BrokerProcess, valkey_server

SERVER = os.environ.get("TLLM_REDIS_SERVER")
"""A redis-server of another version to run these tests against; None = the Valkey of the test extra."""


def _answers(connection: socket.socket) -> bool:
    connection.sendall(b"PING\r\n")
    return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))


def start_redis(*args: str) -> BrokerProcess:
    if SERVER is None:
        return valkey_server(*args)
    plain = ("--bind", "127.0.0.1", "--port", "{port}", "--dir", "{directory}", "--save", "", "--appendonly", "no")
    return BrokerProcess(SERVER, *plain, *args, first_exchange=_answers, scheme="redis")


@pytest.fixture(scope="session")
def redis_server() -> Callable[..., AbstractContextManager[BrokerProcess]]:
    """Starts a server of one's own."""
    return start_redis


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A server that the tests of one file share."""
    with start_redis() as server:
        yield server.url
