"""Who holds an engine name: a key that its holder keeps alive, with its generation and its connection's number at the server.

A name is discovery only: every other key holds the generation. So an engine that loses its name says so and goes on.
"""

from __future__ import annotations

import logging
import time

from redis.exceptions import ResponseError

from tllm_core.errors import TransportError
from tllm_core.transports.redis.connection import Connection, done
from tllm_core.transports.redis.keys import Keys

log = logging.getLogger("tllm_core")

GONE_S = 1.0
"""How long a holder whose connection is gone has to come back before its name is free."""
POLL_S = 0.05


class Claim:
    """The name of one engine generation. One thread at a time."""

    def __init__(self, keys: Keys, ttl_ms: int) -> None:
        self._keys, self._ttl_ms = keys, ttl_ms
        self._value = b""
        self._is_lost = False

    def take(self, connection: Connection) -> None:
        """Raises TransportError where a live engine holds the name."""
        self._value = self._own_value(connection)
        deadline = None
        while connection.call("SET", self._keys.name, self._value, "NX", "PX", self._ttl_ms) is None:
            holder = connection.call("GET", self._keys.name)
            if holder is None:
                continue
            if is_connected(connection, holder) is not False:
                raise TransportError(
                    f"engine {self._keys.engine!r} is already running at this redis server; choose another engine name"
                )
            deadline = deadline or time.monotonic() + GONE_S
            if time.monotonic() > deadline and self._replace(connection, holder):
                return
            time.sleep(POLL_S)  # whether another process comes back can only be asked

    def renew(self, connection: Connection) -> None:
        """Keeps it alive; under a new value where the connection is a new one. Says once if another engine has it."""
        before, self._value = self._value, self._own_value(connection)
        if self._replace(connection, before):
            self._is_lost = False
        elif (
            connection.call("SET", self._keys.name, self._value, "NX", "PX", self._ttl_ms) is None and not self._is_lost
        ):
            self._is_lost = True
            log.warning("another engine has taken the name %r at the redis server", self._keys.engine)

    def release(self, connection: Connection) -> None:
        remove(connection, self._keys, self._value)

    def _replace(self, connection: Connection, before: bytes) -> bool:
        """Only if the value is still `before`."""
        name = self._keys.name
        _, now = done(connection.run([("WATCH", name), ("GET", name)]))
        if now != before:
            connection.call("UNWATCH")
            return False
        set_own = ("SET", name, self._value, "PX", self._ttl_ms)
        return connection.transact(set_own) is not None

    def _own_value(self, connection: Connection) -> bytes:
        return b"%016x %d" % (self._keys.generation, _number(connection))


def remove(connection: Connection, keys: Keys, value: bytes) -> None:
    """Frees the name if it is held under this value."""
    _, now = done(connection.run([("WATCH", keys.name), ("GET", keys.name)]))
    if now == value:
        connection.transact(("DEL", keys.name))
    else:
        connection.call("UNWATCH")


def is_connected(connection: Connection, value: bytes) -> bool | None:
    """Whether the holder's connection is there; None where the server doesn't tell."""
    number = value.partition(b" ")[2]
    if not number.isdigit() or number == b"0":
        return None
    try:
        return bool(connection.call("CLIENT", "LIST", "ID", number).strip())
    except ResponseError:
        return None


def _number(connection: Connection) -> int:
    try:
        return int(connection.call("CLIENT", "ID"))
    except ResponseError:
        return 0
