"""The engine's end of a lane, made from a WorldSpec: for a rank and for the watcher."""

from __future__ import annotations

import logging

from tllm_core.config import convert_options
from tllm_core.contracts.interfaces import Capability, EngineAddress, EnginePort, Transport, WorldSpec
from tllm_core.contracts.messages import EngineInfo
from tllm_core.registry import Registry
from tllm_core.wire.link import EngineLink
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.settings import WireSettings

log = logging.getLogger("tllm_core")


def transport_of(spec: WorldSpec) -> Transport:
    """The transport with its options. Raises ConfigError or PluginError."""
    transport_type = Registry().transport(spec.transport)
    options = convert_options(transport_type.settings_type, spec.transport_options, f"transport.{spec.transport}")
    return transport_type(options)


def discard(spec: WorldSpec, address: EngineAddress) -> None:
    """Removes what a dead process of the world left at its address: sockets and the like."""
    try:
        transport_of(spec).discard(address)
    except Exception:
        log.exception("what was left at %s could not be removed", address.endpoints)


def wire_of(spec: WorldSpec) -> WireSettings:
    """`[wire]` as the world was started with."""
    return convert_options(WireSettings, spec.wire, "wire")


def liveness_of(spec: WorldSpec) -> LivenessSettings:
    """`[liveness]` as the world was started with."""
    return convert_options(LivenessSettings, spec.liveness, "liveness")


def engine_link(
    spec: WorldSpec, transport: Transport, port: EnginePort, info: EngineInfo, *, owner: bytes = b""
) -> EngineLink:
    """All sessions of one port. owner: what lets a session stop the world; empty = none can."""
    return EngineLink(
        port,
        key=spec.key,
        owner=owner,
        info=info,
        by_reference=Capability.CROSS_PROCESS not in transport.capabilities,
        reliable=Capability.RELIABLE in transport.capabilities,
        settings=wire_of(spec),
        liveness=liveness_of(spec),
    )
