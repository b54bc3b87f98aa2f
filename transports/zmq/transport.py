"""The zmq transport: takes the name, binds, and only then says where."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import ClassVar

import zmq
from msgspec import Struct

from tllm_core.contracts.interfaces import Capability, EngineAddress, PeerId, Transport
from tllm_core.errors import ConfigError, TransportError
from tllm_core.transports.zmq.names import HeldName, discard, private_directory
from tllm_core.transports.zmq.ports import ZmqEnginePort, ZmqFrontendPort
from tllm_core.transports.zmq.reach import objection, unreachable
from tllm_core.transports.zmq.settings import ZmqSettings

ENDPOINT = "zmq"
WILDCARDS = ("*", "0.0.0.0", "::")
MEET_S = 1.0
"""An engine listens before its address is told, so that a refusal is none that passes."""


class ZmqTransport(Transport):
    """One connection per frontend; the engine binds. Connecting by tcp waits up to MEET_S for the first connection."""

    name: ClassVar[str] = "zmq"
    settings_type: ClassVar[type[Struct]] = ZmqSettings
    capabilities: ClassVar[Capability] = (
        Capability.CROSS_PROCESS
        | Capability.CROSS_HOST
        | Capability.MANY_FRONTENDS
        | Capability.RELIABLE
        | Capability.RECONNECTS
    )
    settings: ZmqSettings

    def listen(self, engine: str, generation: int) -> ZmqEnginePort:
        """Raises TransportError for a name that a live engine holds, ConfigError for what can't be bound."""
        settings = self.settings
        _check_name(engine)
        directory = private_directory(settings.directory)
        if settings.protocol == "ipc":
            _check_length(directory, engine)
        held = _take_name(directory, engine, generation, settings.name_timeout_s)
        port = None
        try:
            port = ZmqEnginePort(settings, held)
            endpoint = _bind_ipc(port, held.socket_path) if settings.protocol == "ipc" else _bind_tcp(port, settings)
        except BaseException:
            held.release() if port is None else port.close()
            raise
        port.address = EngineAddress(
            transport=self.name, engine=engine, generation=generation, endpoints={ENDPOINT: endpoint}
        )
        return port

    def connect(self, engine: EngineAddress, peer: PeerId) -> ZmqFrontendPort:
        """Raises TransportError for an address that is none of this transport's, and for one where the system says for MEET_S
        that nobody is to be reached."""
        endpoint = engine.endpoints.get(ENDPOINT, "")
        if not endpoint.startswith(("ipc://", "tcp://")):
            raise TransportError(f"engine {engine.engine!r} has no zmq address: {engine.endpoints}")
        try:
            port = ZmqFrontendPort(self.settings, endpoint, peer)
        except zmq.ZMQError as error:
            raise TransportError(f"can't connect to {endpoint}: {error}") from None
        if not port.meet(MEET_S) and (why := objection(endpoint)) is not None:
            port.close()
            raise TransportError(unreachable(endpoint, why))
        return port

    def discard(self, address: EngineAddress) -> None:
        directory = private_directory(self.settings.directory)
        with contextlib.suppress(OSError, TransportError):  # the next start sweeps as well
            discard(directory, address.engine, address.generation, self.settings.name_timeout_s)


def _check_name(engine: str) -> None:
    try:
        usable = bool(engine) and bool(engine.encode())
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ConfigError(f"an engine can't be named {engine!r}: a name is text of at least one character")


def _take_name(directory: Path, engine: str, generation: int, timeout_s: float) -> HeldName:
    try:
        return HeldName(directory, engine, generation, timeout_s)
    except OSError as error:
        raise ConfigError(
            f"can't hold the engine name {engine[:80]!r} in {directory}: {error.strerror}; "
            "choose another engine name, or set transport.zmq.directory"
        ) from None


def _check_length(directory: Path, engine: str) -> None:
    path = HeldName.socket_path_of(directory, engine, 0)
    length, limit = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
    if length > limit:
        raise ConfigError(
            f"the ipc path {path} has {length} bytes, and the system allows {limit}; "
            "set transport.zmq.directory to a shorter directory"
        )


def _bind_ipc(port: ZmqEnginePort, path: Path) -> str:
    try:
        endpoint = port.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise ConfigError(f"can't bind {path}: {error}; set transport.zmq.directory") from None
    path.chmod(0o600)
    return endpoint


def _bind_tcp(port: ZmqEnginePort, settings: ZmqSettings) -> str:
    where = f"{_bracketed(settings.host)}:{settings.port or '*'}"
    try:
        bound = port.bind(f"tcp://{where}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"tcp port {settings.port} on {settings.host} is in use; set transport.zmq.port to another, or 0 for any"
            ) from None
        raise ConfigError(f"can't bind tcp {where}: {error}; check transport.zmq.host") from None
    host = settings.advertise_host or (socket.gethostname() if settings.host in WILDCARDS else settings.host)
    return f"tcp://{_bracketed(host)}:{bound.rpartition(':')[2]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
