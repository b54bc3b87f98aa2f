"""The reading half of a port: one thread that waits at the server, from the last entry it has seen of each stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tllm_core.transports.redis.connection import LOST, Command, Connection, done, in_words
from tllm_core.transports.redis.path import READ, Path
from tllm_core.transports.redis.settings import RedisSettings

READ_ENTRIES = 128
"""Entries of one stream in one answer."""
JOIN_S = 1.0


class Reader:
    """positions: stream -> last id seen. arrived: (stream, entries) -> commands to run at once. wait: until there is room.

    lost: the connection was, and why.
    """

    def __init__(
        self,
        settings: RedisSettings,
        dial: Callable[[float], Connection],
        path: Path,
        *,
        positions: Callable[[], Sequence[tuple[bytes, bytes]]],
        arrived: Callable[[bytes, list[Any]], list[Command]],
        wait: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._settings, self._dial, self._path = settings, dial, path
        self._positions, self._arrived, self._wait, self._lost = positions, arrived, wait, lost
        self._connection: Connection | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tllm-redis-read", daemon=True)

    def start(self, connection: Connection) -> None:
        self._connection = connection
        self._thread.start()

    def close(self) -> None:
        """Ends it, also where it waits at the server."""
        self._over.set()
        connection = self._connection
        if connection is not None:
            connection.shut()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)  # one that is connecting just now ends by itself

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._over = threading.Event()
        self._over.set()
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                try:
                    self._round()
                except LOST as error:
                    self._lose(in_words(error))
        finally:
            if self._connection is not None:
                self._connection.close()

    def _round(self) -> None:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._dial(self._settings.block_s)
            if self._over.is_set():
                return
            connection.call("PING")
            self._path.proven(READ, time.monotonic())
            self._path.back(READ)
        self._read(connection)
        self._wait()

    def _lose(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not self._over.is_set():
            self._path.lost(READ, reason)
            self._lost(reason)
            self._over.wait(self._settings.reconnect_s)

    def _read(self, connection: Connection) -> None:
        positions = self._positions()
        block_ms = max(1, int(self._settings.block_s * 1000))
        keys, ids = zip(*positions, strict=True)
        sent_at = time.monotonic()
        found = connection.call("XREAD", "COUNT", READ_ENTRIES, "BLOCK", block_ms, "STREAMS", *keys, *ids)
        self._path.proven(READ, sent_at)
        commands: list[Command] = []
        for key, entries in found or ():
            commands += self._arrived(key, entries)
        if commands:
            done(connection.run(commands))
