"""The NATS transport: engine and frontends meet at a server that both can reach."""

from __future__ import annotations

import importlib.util
import os
from typing import ClassVar

from msgspec import Struct

from tllm_core.contracts.interfaces import Capability, EngineAddress, PeerId, Transport
from tllm_core.errors import ConfigError, TransportError
from tllm_core.transports.nats.ports import NatsEnginePort, NatsFrontendPort
from tllm_core.transports.nats.settings import (
    DEFAULT_URL,
    NatsSettings,
    checked_name,
    is_prefix,
    shown_urls,
    split_urls,
)
from tllm_core.transports.nats.subjects import Subjects


class NatsTransport(Transport):
    """Core subjects. A frame that is published while its receiver is disconnected is gone; the lane sends it again."""

    name: ClassVar[str] = "nats"
    settings_type: ClassVar[type[Struct]] = NatsSettings
    capabilities: ClassVar[Capability] = (
        Capability.CROSS_PROCESS | Capability.CROSS_HOST | Capability.MANY_FRONTENDS | Capability.RECONNECTS
    )
    settings: NatsSettings

    def listen(self, engine: str, generation: int) -> NatsEnginePort:
        """Raises TransportError for a name that a live engine holds, and where the server can't be used."""
        settings = self.settings
        _check_login(settings)
        subjects = Subjects(settings.prefix, checked_name("engine name", engine), generation)
        urls = settings.url or DEFAULT_URL
        address = EngineAddress(
            transport=self.name,
            engine=engine,
            generation=generation,
            endpoints={"url": shown_urls(urls), "prefix": settings.prefix},
        )
        port = NatsEnginePort(settings, split_urls(urls), subjects, address)
        port.open()
        return port

    def connect(self, engine: EngineAddress, peer: PeerId) -> NatsFrontendPort:
        """Raises TransportError for an address that is none of this transport's, and where the server can't be used."""
        settings = self.settings
        _check_login(settings)
        prefix = engine.endpoints.get("prefix", "")
        if not is_prefix(prefix):
            raise TransportError(f"engine {engine.engine!r} has no nats address: {engine.endpoints}")
        subjects = Subjects(prefix, checked_name("engine name", engine.engine), engine.generation)
        try:
            urls = split_urls(settings.url or engine.endpoints.get("url", ""))
        except ValueError as error:
            raise TransportError(f"engine {engine.engine!r} has no nats address: {error}") from None
        port = NatsFrontendPort(settings, urls, subjects, peer)
        port.open()
        return port


def _check_login(settings: NatsSettings) -> None:
    """Raises ConfigError for a login by key that can't be tried."""
    keyed = settings.nkey_seed_file or settings.credentials_file
    if keyed and not os.access(keyed, os.R_OK):
        raise ConfigError(f"the login file {keyed} of the nats transport can't be read")
    if keyed and importlib.util.find_spec("nkeys") is None:
        raise ConfigError(f"the login by {keyed} needs a package that is not installed: pip install nkeys")
