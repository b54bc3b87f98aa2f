"""From settings to a running engine world: which parts were chosen, that they fit together, and the wait for Ready."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from msgspec import Struct

from tllm_core.config import Settings, convert_options
from tllm_core.contracts.interfaces import (
    Capability,
    EngineAddress,
    Exited,
    Failed,
    Identified,
    Identity,
    Launcher,
    Listening,
    Phase,
    Ready,
    Transport,
    World,
    WorldSpec,
)
from tllm_core.contracts.messages import Plain
from tllm_core.errors import Cause, ConfigError, EngineStartError
from tllm_core.hooks import Hooks
from tllm_core.registry import Registry
from tllm_core.wire.link import FrontendLink

OnPhase = Callable[[Phase], None]


class Plan:
    """Which transport, launcher and engine were chosen, checked to fit together."""

    def __init__(self, engine: str, transport: Transport, launcher: Launcher, registry: Registry) -> None:
        self.engine = engine
        self.transport = transport
        self.launcher = launcher
        self.hooks = Hooks(registry)
        self.endpoints: dict[str, str] = {}

    @classmethod
    def of(cls, settings: Settings, registry: Registry | None = None) -> Plan:
        """Raises ConfigError or PluginError for a choice that can't be had, or a pair that can't work."""
        registry = registry or Registry()
        for name in settings.plugins.enable:
            registry.plugin(name)
        if settings.engine.name is None:
            raise ConfigError(
                "no engine is chosen; set engine.name in the config file, TLLM_ENGINE__NAME, or pass engine=... "
                f"(installed: {', '.join(registry.names('engine'))})"
            )
        engine = registry.engine(settings.engine.name)
        convert_options(engine.settings_type, settings.engine.options, f"engine.{settings.engine.name}")
        transport_type = registry.transport(settings.transport.name)
        launcher_type = registry.launcher(settings.launcher.name)
        _check_pair(transport_type, launcher_type, registry)
        where_transport, where_launcher = f"transport.{settings.transport.name}", f"launcher.{settings.launcher.name}"
        return cls(
            settings.engine.name,
            transport_type(convert_options(transport_type.settings_type, settings.transport.options, where_transport)),
            launcher_type(convert_options(launcher_type.settings_type, settings.launcher.options, where_launcher)),
            registry,
        )

    def world_spec(self, settings: Settings) -> WorldSpec:
        generation = secrets.randbits(64)
        return WorldSpec(
            engine=self.engine,
            engine_name=f"engine-{generation:016x}",  # names only tell worlds of one host apart; nobody looks this one up
            engine_options=dict(settings.engine.options),
            transport=settings.transport.name,
            transport_options=dict(settings.transport.options),
            wire=msgspec.to_builtins(settings.wire),
            liveness=msgspec.to_builtins(settings.liveness),
            key=secrets.token_bytes(32),
            owner=secrets.token_bytes(16),
            generation=generation,
        )

    def connect(self, address: EngineAddress, spec: WorldSpec, settings: Settings) -> FrontendLink:
        peer = b"\x01" + secrets.token_bytes(15)
        self.endpoints = dict(address.endpoints)
        return FrontendLink(
            self.transport.connect(address, peer),
            address,
            peer=peer,
            key=spec.key,
            owner=spec.owner,
            by_reference=Capability.CROSS_PROCESS not in self.transport.capabilities,
            reliable=Capability.RELIABLE in self.transport.capabilities,
            settings=settings.wire,
            liveness=settings.liveness,
        )

    def summary(self) -> str:
        return f"engine={self.engine}, transport={self.transport.name}, launcher={self.launcher.name}"

    def describe(self) -> dict[str, Plain]:
        return {"engine": self.engine, "transport": self.transport.name, "launcher": self.launcher.name}


def _check_pair(transport: type[Transport], launcher: type[Launcher], registry: Registry) -> None:
    missing = launcher.needs & ~transport.capabilities
    if not missing:
        return
    able = [name for name in registry.names("transport") if launcher.needs in _capabilities(registry, name)]
    raise ConfigError(
        f"the launcher {launcher.name!r} needs a transport that is {missing.name}, and {transport.name!r} is not; "
        f"use one of: {', '.join(able)}, or the launcher 'inline'"
    )


def _capabilities(registry: Registry, name: str) -> Capability:
    try:
        return registry.transport(name).capabilities
    except ConfigError:
        return Capability.NONE


class Start(Struct):
    """What a world said of itself before it was ready. beats: a watcher stands beside the ranks."""

    address: EngineAddress
    ranks: tuple[Identity, ...]
    beats: bool


def wait_ready(world: World, on_phase: OnPhase | None) -> Start:
    """Blocks until Ready. Raises EngineStartError with the child's own error if the world fails or ends before."""
    address: EngineAddress | None = None
    ranks: tuple[Identity, ...] = ()
    beats = False
    while True:
        for event in world.events(None):
            if isinstance(event, Identified):
                ranks, beats = event.ranks, event.watcher is not None
            elif isinstance(event, Listening):
                address = event.address
            elif isinstance(event, Phase) and on_phase is not None:
                on_phase(event)
            elif isinstance(event, Failed | Exited):
                raise EngineStartError(event.cause())
            elif isinstance(event, Ready):
                if address is None:
                    raise EngineStartError(Cause("the engine is ready, but said no address"))
                return Start(address, ranks, beats)
