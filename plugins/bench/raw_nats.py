"""nats-py without anything around it: PUBLISH and SUBSCRIBE, from a thread that hands over to the client's own loop thread.

That is the least a caller pays who lives on no event loop; the echo answers from within its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import ssl
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from tllm_core.contracts.messages import Plain
from tllm_core.plugins.bench.peer import PATIENCE_S, ROUND_TRIP_BYTES, ROUND_TRIPS, peer, ready

T = TypeVar("T")
YIELD_EVERY = 64
"""Messages after which a sender lets its loop write."""


def measure(options: Mapping[str, Plain], frame_bytes: int, messages: int) -> tuple[float, list[float]]:
    """Messages per second, and the round trips in seconds."""
    subject = f"{options.get('prefix', 'tllm')}.bench-{secrets.token_hex(8)}"
    with _Caller(options) as caller:
        inbox = caller.subscribe(f"{subject}.in")
        messages_per_s = _one_way(inbox, dict(options), f"{subject}.in", frame_bytes, messages)
        return messages_per_s, _round_trips(caller, inbox, dict(options), subject)


def _one_way(
    inbox: queue.SimpleQueue[bytes], options: dict[str, Plain], subject: str, frame_bytes: int, messages: int
) -> float:
    with peer(__name__, "push", options=options, subject=subject, size=frame_bytes, count=messages + 1):
        inbox.get(timeout=PATIENCE_S)
        started = time.perf_counter()
        for _ in range(messages):
            inbox.get(timeout=PATIENCE_S)
        return messages / (time.perf_counter() - started)


def _round_trips(
    caller: _Caller, inbox: queue.SimpleQueue[bytes], options: dict[str, Plain], subject: str
) -> list[float]:
    payload, trips = b"x" * ROUND_TRIP_BYTES, []
    with peer(__name__, "echo", options=options, subject=f"{subject}.out", to=f"{subject}.in", count=ROUND_TRIPS + 1):
        for _ in range(ROUND_TRIPS + 1):
            started = time.perf_counter()
            caller.publish(f"{subject}.out", payload)
            inbox.get(timeout=PATIENCE_S)
            trips.append(time.perf_counter() - started)
    return trips[1:]


class _Caller:
    """A client on a loop thread of its own, for callers on other threads; a context manager."""

    def __init__(self, options: Mapping[str, Plain]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-nats", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(_connect(options))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self._wait(self._client.close())

    def subscribe(self, subject: str) -> queue.SimpleQueue[bytes]:
        """A queue of what arrives there, from now on."""
        inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        async def arrived(message: Msg) -> None:
            inbox.put(message.data)

        async def subscribed() -> None:
            await self._client.subscribe(subject, cb=arrived)
            await self._client.flush()

        self._wait(subscribed())
        return inbox

    def publish(self, subject: str, payload: bytes) -> None:
        asyncio.run_coroutine_threadsafe(self._client.publish(subject, payload), self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _connect(options: Mapping[str, Plain]) -> Client:
    """A client of the server that the transport's options name. Its errors end the measurement by its patience."""

    async def quiet(error: Exception) -> None:
        """The client's own would print every error with a traceback."""

    urls = options["url"]
    given: dict[str, Any] = {key: options[key] for key in ("user", "password", "token") if options.get(key)}
    if options.get("credentials_file"):
        given["user_credentials"] = options["credentials_file"]
    if options.get("nkey_seed_file"):
        given["nkeys_seed"] = options["nkey_seed_file"]
    if options.get("tls_ca_file"):
        given["tls"] = ssl.create_default_context(cafile=str(options["tls_ca_file"]))
    servers = urls.split(",") if isinstance(urls, str) else urls
    return await nats.connect(servers, error_cb=quiet, allow_reconnect=False, **given)


# ------------------------------------------------------------------------------------------------ the other end


def push(options: dict[str, Plain], subject: str, size: int, count: int) -> None:
    """Sends `count` messages as fast as it can."""
    asyncio.run(_push(options, subject, b"x" * size, count))


async def _push(options: dict[str, Plain], subject: str, payload: bytes, count: int) -> None:
    client = await _connect(options)
    ready()
    for number in range(count):
        await client.publish(subject, payload)
        if number % YIELD_EVERY == 0:
            await asyncio.sleep(0)
    await client.close()  # sends what is still pending


def echo(options: dict[str, Plain], subject: str, to: str, count: int) -> None:
    """Sends back `count` messages."""
    asyncio.run(_echo(options, subject, to, count))


async def _echo(options: dict[str, Plain], subject: str, to: str, count: int) -> None:
    client = await _connect(options)
    left, done = iter(range(count - 1, -1, -1)), asyncio.Event()

    async def answer(message: Msg) -> None:
        await client.publish(to, message.data)
        if next(left) == 0:
            done.set()

    await client.subscribe(subject, cb=answer)
    await client.flush()
    ready()
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    await client.close()
