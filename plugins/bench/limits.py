"""What can't be exceeded: waking consumers without any transport, and ZeroMQ without anything around it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import zmq
from msgspec import Struct

PEER = "tllm_core.plugins.bench.peer"
ROUND_TRIPS = 1000
ROUND_TRIP_BYTES = 100
PATIENCE_MS = 30_000

# ----------------------------------------------------------------------------------------------------- waking


async def async_wakes_per_s(streams: int, steps: int) -> float:
    """Futures set and awaited per second: a loop sets one per stream and step, and each stream's task awaits its own."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(streams)]

    async def consume(stream: int) -> int:
        total = 0
        for _ in range(steps):
            total += await futures[stream]
            futures[stream] = loop.create_future()
        return total

    tasks = [asyncio.create_task(consume(stream)) for stream in range(streams)]
    await asyncio.sleep(0)
    started = time.perf_counter()
    for _ in range(steps):
        for future in futures:
            future.set_result(1)
        await asyncio.sleep(0)
    totals = await asyncio.gather(*tasks)
    return sum(totals) / (time.perf_counter() - started)


def sync_wakes_per_s(streams: int, steps: int) -> float:
    """Locks released and acquired per second: a thread releases one per stream and step, and one thread acquires them in turn."""
    locks = [threading.Lock() for _ in range(streams)]
    for lock in locks:
        lock.acquire()
    rounds = threading.Semaphore(1)

    def produce() -> None:
        for _ in range(steps):
            rounds.acquire()
            for lock in locks:
                lock.release()

    thread = threading.Thread(target=produce)
    started = time.perf_counter()
    thread.start()
    for _ in range(steps):
        for lock in locks:
            lock.acquire()
        rounds.release()
    elapsed = time.perf_counter() - started
    thread.join()
    return streams * steps / elapsed


# -------------------------------------------------------------------------------------------------------- zmq


class Raw(Struct, frozen=True):
    """Frames of `frame_bytes` one way per second, and the round trips of short ones."""

    messages_per_s: float
    frame_bytes: int
    round_trips_s: list[float]


def raw_zmq(frame_bytes: int, messages: int) -> Raw:
    """PUSH/PULL one way and REQ/REP both ways, over ipc, with a process of its own at the other end."""
    with tempfile.TemporaryDirectory(prefix="tllm") as directory, zmq.Context() as context:
        with _bound(context, zmq.PULL, f"ipc://{directory}/push") as pull:
            messages_per_s = _one_way(pull, f"ipc://{directory}/push", frame_bytes, messages)
        with _bound(context, zmq.REQ, f"ipc://{directory}/echo") as request:
            round_trips_s = _round_trips(request, f"ipc://{directory}/echo")
    return Raw(messages_per_s, frame_bytes, round_trips_s)


def _one_way(pull: zmq.Socket[bytes], endpoint: str, frame_bytes: int, messages: int) -> float:
    with _peer("push", endpoint, str(frame_bytes), str(messages + 1)):
        pull.recv()
        started = time.perf_counter()
        for _ in range(messages):
            pull.recv()
        return messages / (time.perf_counter() - started)


def _round_trips(request: zmq.Socket[bytes], endpoint: str) -> list[float]:
    payload, trips = b"x" * ROUND_TRIP_BYTES, []
    with _peer("echo", endpoint, str(ROUND_TRIPS + 1)):
        for _ in range(ROUND_TRIPS + 1):
            started = time.perf_counter()
            request.send(payload)
            request.recv()
            trips.append(time.perf_counter() - started)
    return trips[1:]  # the first one waited for the process to start


@contextlib.contextmanager
def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.bind(endpoint)
        yield socket


@contextlib.contextmanager
def _peer(*arguments: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-m", PEER, *arguments], stdin=subprocess.DEVNULL) as process:
        try:
            yield
            process.wait(PATIENCE_MS / 1000)
        finally:
            process.kill()
