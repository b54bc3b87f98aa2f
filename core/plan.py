"""From settings to a running engine world: which parts were chosen, and that they fit together."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
from msgspec import Struct

from tllm_core.attach import AttachFile
from tllm_core.config import Settings, convert_options
from tllm_core.contracts.interfaces import (
    Capability,
    EngineAddress,
    Exited,
    Failed,
    FrontendPort,
    Identity,
    Launcher,
    Transport,
    World,
    WorldSpec,
)
from tllm_core.contracts.messages import Introduce, Plain, Welcome
from tllm_core.errors import (
    Cause,
    ConfigError,
    EngineDeadError,
    Expelled,
    PortError,
    Refused,
    TransportError,
)
from tllm_core.hooks import Hooks
from tllm_core.ledger.waiting import Deadline
from tllm_core.registry import Registry
from tllm_core.wire.link import FrontendLink
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.settings import WireSettings
from tllm_core.world.attached import AttachedWorld
from tllm_core.world.process import host_id, identify, is_alive
from tllm_core.world.ready import Start

WORDS_S = 1.0
"""How long a watcher may take to say why a rank has ended."""


class Plan:
    """Which transport, launcher and engine were chosen, checked to fit together. No launcher: the world is another's."""

    def __init__(self, engine: str, transport: Transport, launcher: Launcher | None, registry: Registry) -> None:
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

    @classmethod
    def to_attach(cls, settings: Settings, content: AttachFile, registry: Registry | None = None) -> Plan:
        """For a world that runs, over its transport, which is also that of `settings`."""
        registry = registry or Registry()
        for name in settings.plugins.enable:
            registry.plugin(name)
        name = content.transport
        transport_type = registry.transport(name)
        options = settings.transport.options
        return cls(
            content.engine,
            transport_type(convert_options(transport_type.settings_type, options, f"transport.{name}")),
            None,
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
            watch_generation=secrets.randbits(64) or 1,
        )

    def connect(self, address: EngineAddress, spec: WorldSpec, settings: Settings) -> FrontendLink:
        """The owner's lane."""
        self.endpoints = dict(address.endpoints)
        return self._link(address, spec.key, spec.owner, settings.wire, settings.liveness)[0]

    def attach(self, content: AttachFile, settings: Settings, timeout: float) -> Attachment:
        """Opens the lanes to a world that runs: its watcher's first, so that its last words can't be missed.

        Raises EngineDeadError where its processes are gone, Refused, or TransportError where nobody answers for `timeout` s.
        """
        ended = content.ended
        if ended is not None:
            raise EngineDeadError(
                Cause(
                    f"the engine that the attach file names is gone (process {ended.pid}); start one, and attach to that"
                )
            )
        liveness = _merged_liveness(content, settings)
        sight = _Sight(content, liveness.dead_after_s)
        key, deadline = bytes.fromhex(content.key), Deadline(timeout)
        self.endpoints = dict(content.address.endpoints)
        with ExitStack() as closers:
            world = None
            if content.watcher_address is not None:
                watch, port = self._link(content.watcher_address, key, b"", settings.wire, liveness)
                closers.callback(watch.close)
                with _unanswered():
                    watch.open(deadline.left() or 0.0, sight.look)
                world = AttachedWorld(watch, port, _processes(content))
                closers.callback(world.kill)
            link, _ = self._link(content.address, key, b"", settings.wire, liveness)
            closers.callback(link.close)

            # The watcher's lane is read meanwhile: it must not expire, and may tell that nobody will answer.
            def look() -> None:
                _raise_if_ended(world)
                sight.look()

            with _unanswered():
                welcome = self.open(link, deadline.left() or 0.0, look)
            _raise_if_ended(world)
            closers.pop_all()
        return Attachment(link, welcome, world, liveness)

    def open(self, link: FrontendLink, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> Welcome:
        """Opens a lane to an engine, and tells it whose end means the end of this frontend."""
        welcome = link.open(timeout, meanwhile)
        if Capability.CROSS_PROCESS in self.transport.capabilities:
            own = identify(-1, os.getpid())
            link.send(Introduce(host_id(), own.pid, own.start_time))
        return welcome

    def _link(
        self, address: EngineAddress, key: bytes, owner: bytes, wire: WireSettings, liveness: LivenessSettings
    ) -> tuple[FrontendLink, FrontendPort]:
        peer = b"\x01" + secrets.token_bytes(15)
        port = self.transport.connect(address, peer)
        link = FrontendLink(
            port,
            address,
            peer=peer,
            key=key,
            owner=owner,
            by_reference=Capability.CROSS_PROCESS not in self.transport.capabilities,
            reliable=Capability.RELIABLE in self.transport.capabilities,
            settings=wire,
            liveness=liveness,
        )
        return link, port

    @property
    def origin(self) -> str:
        """Who started the engine: a launcher's name, or "attached"."""
        return "attached" if self.launcher is None else self.launcher.name

    @property
    def can_be_shared(self) -> bool:
        """Whether frontends in other processes can reach the engine beside its owner."""
        return Capability.CROSS_PROCESS | Capability.MANY_FRONTENDS in self.transport.capabilities

    def summary(self) -> str:
        return f"engine={self.engine}, transport={self.transport.name}, launcher={self.origin}"

    def describe(self) -> dict[str, Plain]:
        return {"engine": self.engine, "transport": self.transport.name, "launcher": self.origin}


def ticket_for(spec: WorldSpec, start: Start) -> AttachFile:
    """What others need in order to attach to a world."""
    return AttachFile(
        engine=spec.engine,
        transport=spec.transport,
        address=start.address,
        watcher_address=start.watcher_address,
        key=spec.key.hex(),
        host=host_id(),
        ranks=start.ranks,
        watcher=start.watcher,
        liveness=spec.liveness,
    )


class Attachment(Struct):
    """The lanes to a world that somebody else started. world: None where no watcher can be heard."""

    link: FrontendLink
    welcome: Welcome
    world: World | None
    liveness: LivenessSettings


class _Sight:
    """What can be seen of the world's processes where they are on this host: a stopped or dead one answers nobody.

    One that is stopped gets `after_s` to go on, as a debugger may hold it for a moment.
    """

    def __init__(self, content: AttachFile, after_s: float) -> None:
        self._content, self._after_s = content, after_s
        self._stopped_since: float | None = None
        self._ended_since: float | None = None

    def look(self) -> None:
        """Raises EngineDeadError."""
        content, now = self._content, time.monotonic()
        if (ended := content.ended) is not None:
            self._ended_since = self._ended_since or now
            if content.watcher is None or not is_alive(content.watcher) or now - self._ended_since > WORDS_S:
                raise EngineDeadError(Cause(f"the engine that the attach file names is gone (process {ended.pid})"))
            return  # its watcher knows why
        if (stopped := content.stopped) is None:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > self._after_s:
            who = "watcher" if stopped == content.watcher else f"rank {stopped.rank}"
            raise EngineDeadError(
                Cause(f"the engine's {who} is stopped (process {stopped.pid}; SIGSTOP, or a debugger)")
            )


@contextmanager
def _unanswered() -> Iterator[None]:
    """Says what it may mean that nobody answers."""
    try:
        yield
    except (Refused, PortError, Expelled):
        raise
    except TransportError as error:
        raise TransportError(
            f"{error}: the engine of the attach file is gone, can't be reached from here, or has another key"
        ) from None


def _raise_if_ended(world: World | None) -> None:
    """Raises EngineDeadError once the world says that it ended."""
    for event in () if world is None else world.events(0):
        if isinstance(event, Failed | Exited):
            raise EngineDeadError(event.cause())


def _processes(content: AttachFile) -> dict[str, Identity]:
    """Those whose end is the world's and can be seen from here."""
    if not content.is_here:
        return {}
    named = {} if content.watcher is None else {"the engine's watcher": content.watcher}
    return named | {f"engine rank {rank.rank}": rank for rank in content.ranks[:1]}


def _merged_liveness(content: AttachFile, settings: Settings) -> LivenessSettings:
    """The engine's own, over which goes what was set on this side."""
    set_here = {key.partition(".")[2] for key in settings.origins if key.startswith("liveness.")}
    own = {key: value for key, value in msgspec.to_builtins(settings.liveness).items() if key in set_here}
    known = {key: value for key, value in content.liveness.items() if key in LivenessSettings.__struct_fields__}
    return convert_options(LivenessSettings, {**known, **own}, "liveness")


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
