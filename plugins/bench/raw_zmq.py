"""ZeroMQ without anything around it: PUSH/PULL one way and REQ/REP both ways, over ipc."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping

import zmq

from tllm_core.contracts.messages import Plain
from tllm_core.plugins.bench.peer import PATIENCE_S, ROUND_TRIP_BYTES, ROUND_TRIPS, peer, ready


def measure(options: Mapping[str, Plain], frame_bytes: int, messages: int) -> tuple[float, list[float]]:
    """Messages per second, and the round trips in seconds."""
    with tempfile.TemporaryDirectory(prefix="tllm") as directory, zmq.Context() as context:
        with _bound(context, zmq.PULL, f"ipc://{directory}/push") as pull:
            messages_per_s = _one_way(pull, f"ipc://{directory}/push", frame_bytes, messages)
        with _bound(context, zmq.REQ, f"ipc://{directory}/echo") as request:
            round_trips_s = _round_trips(request, f"ipc://{directory}/echo")
    return messages_per_s, round_trips_s


def _one_way(pull: zmq.Socket[bytes], endpoint: str, frame_bytes: int, messages: int) -> float:
    with peer(__name__, "push", endpoint=endpoint, size=frame_bytes, count=messages + 1):
        pull.recv()
        started = time.perf_counter()
        for _ in range(messages):
            pull.recv()
        return messages / (time.perf_counter() - started)


def _round_trips(request: zmq.Socket[bytes], endpoint: str) -> list[float]:
    payload, trips = b"x" * ROUND_TRIP_BYTES, []
    with peer(__name__, "echo", endpoint=endpoint, count=ROUND_TRIPS + 1):
        for _ in range(ROUND_TRIPS + 1):
            started = time.perf_counter()
            request.send(payload)
            request.recv()
            trips.append(time.perf_counter() - started)
    return trips[1:]  # the first one may have waited for the connection


@contextlib.contextmanager
def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.bind(endpoint)
        yield socket


# ------------------------------------------------------------------------------------------------ the other end


def push(endpoint: str, size: int, count: int) -> None:
    """Sends `count` messages as fast as it can."""
    payload = b"x" * size
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(endpoint)
        ready()
        for _ in range(count):
            socket.send(payload)


def echo(endpoint: str, count: int) -> None:
    """Sends back `count` messages."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.connect(endpoint)
        ready()
        for _ in range(count):
            socket.send(socket.recv())
