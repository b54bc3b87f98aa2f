"""The redis transport: takes the engine's name at the server, and only then says where it is."""

from __future__ import annotations

import logging
import time
from typing import ClassVar

from msgspec import Struct

from tllm_core.contracts.interfaces import Capability, EngineAddress, PeerId, Transport
from tllm_core.errors import ConfigError, TransportError
from tllm_core.transports.redis.claim import Claim, is_connected, remove
from tllm_core.transports.redis.connection import LOST, Connection, Dialer, in_words
from tllm_core.transports.redis.keys import Keys
from tllm_core.transports.redis.ports import RedisEnginePort, RedisFrontendPort
from tllm_core.transports.redis.server import check_server
from tllm_core.transports.redis.settings import RedisSettings

log = logging.getLogger("tllm_core")

NOTICED_S = 0.5
"""How long a server may take to notice that a process is gone."""
DISCARD_S = 0.5
"""How long a server may take to answer where keys of a dead engine are removed; what is left goes with its time to live."""
POLL_S = 0.02
SCANNED = 1000


class RedisTransport(Transport):
    """Streams at a server that both sides reach. `listen` and `connect` wait `connect_timeout_s` for a server that starts, and
    raise at once what else is wrong with it."""

    name: ClassVar[str] = "redis"
    settings_type: ClassVar[type[Struct]] = RedisSettings
    capabilities: ClassVar[Capability] = (
        Capability.CROSS_PROCESS
        | Capability.CROSS_HOST
        | Capability.MANY_FRONTENDS
        | Capability.RELIABLE
        | Capability.RECONNECTS
    )
    settings: RedisSettings

    def listen(self, engine: str, generation: int) -> RedisEnginePort:
        """Raises ConfigError for names and URLs that can't be used, TransportError for a server that can't, or a taken name."""
        settings = self.settings
        keys = Keys.of(settings.prefix, engine, generation)
        dialer = Dialer(settings)
        claim = Claim(keys, settings.ttl_ms)
        connection: Connection | None = None
        try:
            connection = dialer.dial_patiently()
            check_server(connection, dialer.where, settings.max_frame_bytes)
            claim.take(connection)
            port = RedisEnginePort(settings, dialer, keys, claim)
            port.open(connection)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, LOST):
                raise dialer.refusal(error) from None
            raise
        return port

    def connect(self, engine: EngineAddress, peer: PeerId) -> RedisFrontendPort:
        """Raises TransportError for a server that can't be used, or an address that is none of this transport's."""
        keys, dialer = self._keys(engine), self._dialer(engine)
        port = RedisFrontendPort(self.settings, dialer, keys, peer)
        try:
            port.open()
        except LOST as error:
            raise dialer.refusal(error) from None
        return port

    def discard(self, address: EngineAddress) -> None:
        """Removes the keys of a generation, unless its engine is still connected."""
        try:
            keys, dialer = self._keys(address), self._dialer(address)
            connection = dialer.dial(at_most_s=DISCARD_S)
        except (*LOST, ConfigError, TransportError) as error:
            log.debug("nothing was removed at %s: %s", address.endpoints, in_words(error))
            return
        try:
            _discard(connection, keys)
        except LOST as error:
            log.debug("not everything was removed at %s: %s", dialer.where, in_words(error))
        finally:
            connection.close()

    def _dialer(self, address: EngineAddress) -> Dialer:
        return Dialer(self.settings, address.endpoints["redis"])

    def _keys(self, address: EngineAddress) -> Keys:
        if "redis" not in address.endpoints:
            raise TransportError(f"engine {address.engine[:80]!r} has no redis address: {address.endpoints}")
        prefix = address.endpoints.get("prefix", self.settings.prefix)
        return Keys.of(prefix, address.engine, address.generation)


def _discard(connection: Connection, keys: Keys) -> None:
    deadline = time.monotonic() + NOTICED_S
    holder = connection.call("GET", keys.name) or b""
    if holder.partition(b" ")[0] == b"%016x" % keys.generation:
        while is_connected(connection, holder):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)  # the server can only be asked
        remove(connection, keys, holder)
    cursor = b"0"
    while True:
        cursor, found = connection.call("SCAN", cursor, "MATCH", keys.root + b"*", "COUNT", SCANNED)
        if found:
            connection.call("UNLINK", *found)
        if int(cursor) == 0:
            return
