"""The unix transport: what the entry point names."""

from __future__ import annotations

import contextlib
import socket
from typing import ClassVar

from msgspec import Struct

from tllm_core.contracts.interfaces import Capability, EngineAddress, PeerId, Transport
from tllm_core.errors import ConfigError, TransportError
from tllm_transport_unix.connection import Connection
from tllm_transport_unix.names import Name, discard_dead, private_directory
from tllm_transport_unix.ports import UnixEnginePort, UnixFrontendPort
from tllm_transport_unix.settings import UnixSettings


class UnixTransport(Transport):
    """One socket file per engine, one connection per frontend. Nothing leaves this host, or this user."""

    name: ClassVar[str] = "unix"
    settings_type: ClassVar[type[Struct]] = UnixSettings
    capabilities: ClassVar[Capability] = (
        Capability.CROSS_PROCESS | Capability.MANY_FRONTENDS | Capability.RELIABLE | Capability.PEER_LOSS
    )
    settings: UnixSettings

    def listen(self, engine: str, generation: int) -> UnixEnginePort:
        """Raises TransportError for a name that a live engine holds, ConfigError for what can't be bound."""
        name = Name(private_directory(self.settings.directory), engine, generation)
        endpoints = {"path": str(name.path)}
        address = EngineAddress(transport=self.name, engine=engine, generation=generation, endpoints=endpoints)
        return UnixEnginePort(self.settings, name, address)

    def connect(self, engine: EngineAddress, peer: PeerId) -> UnixFrontendPort:
        """Raises TransportError where nobody listens."""
        path = engine.endpoints.get("path", "")
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)  # a queue that is full is an error, and no reason to wait
            connected.connect(path)
        except OSError as error:
            connected.close()
            raise TransportError(f"can't reach engine {engine.engine!r} at {path!r}: {error}; does it run?") from None
        return UnixFrontendPort(self.settings, Connection(connected, self.settings), peer)

    def discard(self, address: EngineAddress) -> None:
        with contextlib.suppress(OSError, TransportError, ConfigError):  # the next `listen` does it as well
            discard_dead(private_directory(self.settings.directory))
