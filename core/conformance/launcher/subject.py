"""Which launcher is tested, and the worlds that its cases start."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import pytest

from tllm_core.config import convert_options
from tllm_core.conformance.case import Suite
from tllm_core.conformance.launcher.watched import Watched
from tllm_core.contracts.interfaces import Capability, Launcher, WorldSpec
from tllm_core.executor import GenerationExecutor
from tllm_core.registry import Registry

GIVE_UP_S = 2.0
"""Of a start that is to be given up."""
SHUTDOWN_S = 20.0
EMPTY: Mapping[str, Any] = MappingProxyType({})

_in_process: dict[type, bool] = {}


class LauncherSuite(Suite):
    """What all launcher cases use. See LauncherConformance for what may be set."""

    launcher: ClassVar[str | type[Launcher]]
    settings: Mapping[str, Any] = EMPTY
    ranks: int = 2
    impatient: Mapping[str, Any] | None = None
    transport: str | None = None
    transport_options: Mapping[str, Any] = EMPTY

    # ------------------------------------------------------------------------------------------------- the subject

    @property
    def launcher_class(self) -> type[Launcher]:
        chosen = type(self).launcher
        return Registry().launcher(chosen) if isinstance(chosen, str) else chosen

    @property
    def reference(self) -> str:
        """How a config names it."""
        chosen = type(self).launcher
        return chosen if isinstance(chosen, str) else f"{chosen.__module__}:{chosen.__qualname__}"

    @property
    def subject(self) -> str:
        return f"the launcher {self.launcher_class.name!r}"

    @property
    def transport_name(self) -> str:
        return self.transport or ("inproc" if self.launcher_class.needs is Capability.NONE else "zmq")

    def in_process(self) -> bool:
        """Whether its worlds are this process, as they say themselves."""
        cls = type(self)
        if cls not in _in_process:
            self.launch().identified()
        return _in_process[cls]

    def need_processes(self) -> None:
        """Skips the case for a launcher whose worlds are this process."""
        if self.in_process():
            pytest.skip(f"{self.subject} starts no process: its worlds name this one")

    def need_ranks(self) -> int:
        """How many there are in a case about several; skips it for a launcher that starts no more than one."""
        self.need_processes()
        if self.ranks < 2:
            pytest.skip(f"{self.subject} starts one rank")
        return self.ranks

    def need_watcher(self, world: Watched) -> int:
        """The pid of the world's watcher; skips the case where there is none."""
        watcher = world.identified().watcher
        if watcher is None:
            pytest.skip(f"{self.subject} has no watcher")
        return watcher.pid

    def need_impatience(self) -> Mapping[str, Any]:
        """Settings with which a start is given up soon; skips the case where it has none."""
        if self.impatient is not None:
            return {**self.settings, **self.impatient}
        names = [field.name for field in msgspec.structs.fields(self.launcher_class.settings_type)]
        if "ready_timeout_s" not in names:
            pytest.skip(f"{self.subject} sets start-up no limit")
        return {**self.settings, "ready_timeout_s": GIVE_UP_S}

    # -------------------------------------------------------------------------------------------------- its worlds

    def make(self, settings: Mapping[str, Any] | None = None) -> Launcher:
        """A launcher with these settings, or with its own."""
        kind = self.launcher_class
        options = dict(self.settings if settings is None else settings)
        return kind(convert_options(kind.settings_type, options, f"launcher.{kind.name}"))

    def launch(self, settings: Mapping[str, Any] | None = None, **engine: Any) -> Watched:
        """A world of the case's own, of the echo engine with these options. Nothing of it outlives the case."""
        world = Watched(self.make(settings).launch(self.world_spec(**engine)))
        self.endings.append(world.end)
        self.open.callback(world.end)
        if type(self) not in _in_process:
            ranks = world.identified().ranks
            _in_process[type(self)] = all(rank.pid == os.getpid() for rank in ranks)
        return world

    def world_spec(self, **engine: Any) -> WorldSpec:
        return WorldSpec(
            engine="echo",
            engine_options=engine,
            engine_name=f"engine-{secrets.token_hex(4)}",
            transport=self.transport_name,
            transport_options=dict(self.transport_options),
            key=secrets.token_bytes(32),
            owner=secrets.token_bytes(16),
            generation=secrets.randbits(63),
            watch_generation=secrets.randbits(63) | 1,
        )

    def executor(self, settings: Mapping[str, Any] | None = None, **engine: Any) -> GenerationExecutor:
        """An executor over a world of the case's own, shut down at its end."""
        executor = GenerationExecutor.create(
            engine="echo",
            engine_options=engine,
            launcher=self.reference,
            launcher_options=dict(self.settings if settings is None else settings),
            transport=self.transport_name,
            transport_options=dict(self.transport_options),
        )
        self.open.callback(executor.shutdown, SHUTDOWN_S)
        return executor


def fault(at: str, do: str, **more: Any) -> Sequence[Mapping[str, Any]]:
    """The echo engine's `faults` with this one in it."""
    return [{"at": at, "do": do, **more}]
