"""Who is tested, and what every case of the suite opens: ports, engine worlds, ways that can be cut."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from tllm_core.config import convert_options, load_settings
from tllm_core.conformance.broker import BrokerProcess
from tllm_core.conformance.case import Suite, missing
from tllm_core.conformance.faults import Detour, EngineProcess
from tllm_core.conformance.transport.pair import Pair
from tllm_core.contracts.interfaces import Capability, EngineAddress, Transport
from tllm_core.errors import ConfigError
from tllm_core.registry import Registry

PATIENCE_S = 25.0
"""How long anything may take that must happen, on a busy machine."""
LONG = 100_000
"""Tokens of a stream that does not end during a case."""
POISON, BOMB, EXIT = 31_001, 31_002, 31_003
"""A prompt that holds one of these fails alone, crashes the engine, or ends its process with code 0."""
FAULTS = [
    {"at": "step", "do": "request_error", "token": POISON, "after": 2, "message": "poison"},
    {"at": "step", "do": "raise", "token": BOMB, "after": 2, "message": "bomb"},
    {"at": "step", "do": "exit", "token": EXIT, "after": 2, "exitcode": 0},
]
ENGINE = {"step_interval_s": 0.002, "max_seq_len": 8_000_000, "max_batch_size": 256}
PATIENT = {
    "wire.window_frames": 64,
    "wire.backlog_frames": 256,
    "wire.stall_after_s": 3.0,
    "liveness.dead_after_s": 10.0,
    "liveness.frontend_dead_after_s": 30.0,
}
"""Small windows, so that they fill; and time, so that a busy machine is no death."""

_kept: dict[type, EngineProcess] = {}


class TransportSubject(Suite):
    """transport: an entry-point name, "module:Class", or the class. settings: a mapping, or a method that makes it from the
    address (host:port) of `broker`, which is None where there is none. narrow: settings that make its queues small, so that
    they are soon full. lacks: capabilities that these settings take away. `directory` is empty, private and short.
    """

    transport: ClassVar[str | type[Transport]]
    broker: ClassVar[BrokerProcess | None] = None
    settings: Any = MappingProxyType({})
    narrow: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    lacks: ClassVar[Capability] = Capability.NONE
    _directory: ClassVar[str | None] = None

    def leftovers(self) -> Sequence[str]:
        """Names of what the transport keeps outside of this process at the moment, such as keys; none where all is closed."""
        return ()

    # --------------------------------------------------------------------------------------------------- the subject

    @property
    def transport_class(self) -> type[Transport]:
        chosen = type(self).transport
        return Registry().transport(chosen) if isinstance(chosen, str) else chosen

    @property
    def reference(self) -> str:
        """How a config names it."""
        chosen = type(self).transport
        return chosen if isinstance(chosen, str) else f"{chosen.__module__}:{chosen.__qualname__}"

    @property
    def subject(self) -> str:
        return f"the transport {self.transport_class.name!r}"

    def claimed(self) -> Capability:
        return self.transport_class.capabilities & ~type(self).lacks

    def claims(self, capability: Capability) -> bool:
        return capability in self.claimed()

    @property
    def directory(self) -> str:
        cls = type(self)
        if cls._directory is None:
            cls._directory = tempfile.mkdtemp(prefix="tllm-")  # pytest's own paths are too long for a socket
            atexit.register(shutil.rmtree, cls._directory, True)
        return cls._directory

    # ------------------------------------------------------------------------------------------------ what is opened

    def options(self, address: str | None = None, **more: Any) -> dict[str, Any]:
        """The transport's settings, for the broker at `address`, or at its own."""
        where = address or self.server_address()
        chosen = self.settings(where) if callable(self.settings) else self.settings
        return {**chosen, **more}

    def server_address(self) -> str:
        """host:port of the broker, which then runs; "" where there is none."""
        server = type(self).broker
        if server is None:
            return ""
        try:
            if server.port and not server.pid:
                server.restart()
            return server.start().address
        except ConfigError as error:
            missing(str(error))

    def make(self, options: Mapping[str, Any] | None = None) -> Transport:
        """A transport with these options, or with its own."""
        kind = self.transport_class
        return kind(convert_options(kind.settings_type, self.options() if options is None else options, "settings"))

    def pair(self, **more: Any) -> Pair:
        """Both ends of a lane."""
        return self.open.enter_context(contextlib.closing(Pair(self.make(self.options(**more)))))

    def start(self, engine: Mapping[str, Any] | None = None, **overrides: Any) -> EngineProcess:
        """An engine world of the case's own: in processes where the transport crosses them, else in a thread."""
        launcher = "spawn" if self.claims(Capability.CROSS_PROCESS) else "inline"
        settings = load_settings(
            None,
            overrides={
                "engine.name": "echo",
                "engine.options": {**ENGINE, **(engine or {})},
                "transport.name": self.reference,
                "transport.options": self.options(),
                "launcher.name": launcher,
                **PATIENT,
                **{name.replace("__", "."): value for name, value in overrides.items()},
            },
        )
        world = self.open.enter_context(EngineProcess(settings))
        self.endings.append(world.end)
        return world

    def world(self) -> EngineProcess:
        """An engine world that cases share and leave whole; after one that fails, the next one gets another."""
        cls, world = type(self), _kept.get(type(self))
        if world is None or not world.owner.check_health():
            self.end_world()
            with contextlib.ExitStack() as own:
                case_stack, self.open = self.open, own
                try:
                    world = self.start()
                finally:
                    self.open = case_stack
                own.pop_all()
            _kept[cls] = world
        self.endings.append(world.end)
        self.open.push(self._on_end)
        return world

    def _on_end(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(AssertionError):
                self.end_world()

    @classmethod
    def end_world(cls) -> None:
        """Ends the shared world, where there is one."""
        world = _kept.pop(cls, None)
        if world is not None:
            world.close()

    @classmethod
    def teardown_class(cls) -> None:
        """Ends what its cases shared."""
        try:
            cls.end_world()
        finally:
            if cls.broker is not None:
                cls.broker.stop()
            if cls._directory is not None:
                shutil.rmtree(cls._directory, ignore_errors=True)
                cls._directory = None

    def detour(self, address: EngineAddress) -> Detour:
        """A way to that address that can be cut. Skips where it has no host and port."""
        detour = self.open.enter_context(Detour())
        detour.turn_text(self.server_address())
        detour.turn(address)
        if not detour.proxies:
            pytest.skip("NOT CHECKED: its address is no host and port, so that there is nothing to cut")
        return detour

    def options_through(self, detour: Detour) -> dict[str, Any]:
        """The settings of a frontend that goes that way."""
        return self.options(detour.turn_text(self.server_address()) or None)


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Waits for a condition, which must come true."""
    deadline, tick = time.monotonic() + timeout_s, threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true within {timeout_s:g} s: {what}")
        tick.wait(0.01)
    return value


def descriptors() -> int:
    """How many this process has open; 0 where the system doesn't tell."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@atexit.register
def _end_all() -> None:
    for world in list(_kept.values()):
        with contextlib.suppress(AssertionError):
            world.close()
    _kept.clear()
