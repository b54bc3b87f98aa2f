"""redis-py without anything around it: XADD and a blocking XREAD of its sync client, on one stream per direction."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tllm_core.contracts.messages import Plain
from tllm_core.errors import TransportError
from tllm_core.plugins.bench.peer import PATIENCE_S, ROUND_TRIP_BYTES, ROUND_TRIPS, peer, ready

PIPELINED = 64
"""Entries that a sender writes at once."""
AT_ONCE = 1000
"""Entries that a reader takes at once."""


def measure(options: Mapping[str, Plain], frame_bytes: int, messages: int) -> tuple[float, list[float]]:
    """Messages per second, and the round trips in seconds."""
    key = f"{options.get('prefix', 'tllm')}:bench-{secrets.token_hex(8)}"
    with _client(options) as client:
        try:
            messages_per_s = _one_way(client, dict(options), f"{key}:push", frame_bytes, messages)
            return messages_per_s, _round_trips(client, dict(options), key)
        finally:
            client.delete(f"{key}:push", f"{key}:out", f"{key}:in")


def _one_way(client: Any, options: dict[str, Plain], key: str, frame_bytes: int, messages: int) -> float:
    reader = _Reader(client, key)
    with peer(__name__, "push", options=options, key=key, size=frame_bytes, count=messages + 1):
        reader.read(1)
        started, left = time.perf_counter(), messages
        while left > 0:
            left -= reader.read(AT_ONCE)
        return messages / (time.perf_counter() - started)


def _round_trips(client: Any, options: dict[str, Plain], key: str) -> list[float]:
    payload, trips, reader = {"f": b"x" * ROUND_TRIP_BYTES}, [], _Reader(client, f"{key}:in")
    with peer(__name__, "echo", options=options, key=f"{key}:out", to=f"{key}:in", count=ROUND_TRIPS + 1):
        for _ in range(ROUND_TRIPS + 1):
            started = time.perf_counter()
            client.xadd(f"{key}:out", payload)
            reader.read(1)
            trips.append(time.perf_counter() - started)
    return trips[1:]


class _Reader:
    """Reads a stream from its beginning."""

    def __init__(self, client: Any, key: str) -> None:
        self._client, self._key, self._last = client, key, "0-0"
        self.entries: list[tuple[Any, Any]] = []

    def read(self, at_most: int) -> int:
        """Waits for entries and says how many came. Raises TransportError where none does."""
        found = self._client.xread({self._key: self._last}, count=at_most, block=int(PATIENCE_S * 1000))
        if not found:
            raise TransportError(f"nothing came over the broker within {PATIENCE_S:.0f} s")
        self.entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        self._last = self.entries[-1][0]
        return len(self.entries)


@contextlib.contextmanager
def _client(options: Mapping[str, Plain]) -> Iterator[Any]:
    """A client of the server that the transport's options name, without retries: these would hide what is measured."""
    given = {key: options[key] for key in ("username", "password", "db") if options.get(key) is not None}
    if options.get("tls_ca_file"):
        given["ssl_ca_certs"] = options["tls_ca_file"]
    client = redis.Redis.from_url(
        str(options["url"]), retry=Retry(NoBackoff(), 0), socket_timeout=2 * PATIENCE_S, **given
    )
    try:
        yield client
    finally:
        client.close()


# ------------------------------------------------------------------------------------------------ the other end


def push(options: dict[str, Plain], key: str, size: int, count: int) -> None:
    """Writes `count` entries as fast as it can."""
    payload = {"f": b"x" * size}
    with _client(options) as client:
        ready()
        for first in range(0, count, PIPELINED):
            pipeline = client.pipeline(transaction=False)
            for _ in range(min(PIPELINED, count - first)):
                pipeline.xadd(key, payload)
            pipeline.execute()


def echo(options: dict[str, Plain], key: str, to: str, count: int) -> None:
    """Writes back `count` entries."""
    with _client(options) as client:
        reader = _Reader(client, key)
        ready()
        for _ in range(count):
            reader.read(1)
            client.xadd(to, reader.entries[0][1])
