"""The inline launcher: rank 0 runs in a thread of this process. For tests, debugging and small models."""

import os
import queue
import threading
from collections.abc import Sequence
from typing import ClassVar

from msgspec import Struct

from tllm_core.contracts.interfaces import (
    Exited,
    Failed,
    Identified,
    Launcher,
    Listening,
    Phase,
    Ready,
    World,
    WorldEvent,
    WorldSpec,
)
from tllm_core.contracts.messages import Plain
from tllm_core.errors import ConfigError
from tllm_core.world.channel import FromRank
from tllm_core.world.process import identify
from tllm_core.world.rank import Parts, RankContext, lead, resolve

KILL_S = 1.0
"""How long `kill` waits for the engine's thread."""


class InlineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to set."""


class InlineLauncher(Launcher):
    """Works with any transport. A thread can't be killed: an engine that never returns is left to the process's end."""

    name: ClassVar[str] = "inline"
    settings_type: ClassVar[type[Struct]] = InlineSettings

    def launch(self, spec: WorldSpec) -> World:
        """Raises ConfigError for an engine of several ranks, which need processes of their own."""
        parts = resolve(spec)
        if parts.world_size != 1:
            raise ConfigError(
                f"launcher: inline runs one rank, and engine {spec.engine!r} is set to {parts.world_size}; use spawn"
            )
        return InlineWorld(parts)


class InlineWorld(World):
    """An engine in a thread of this process. In a fork of it there is no such thread, and every method does nothing."""

    def __init__(self, parts: Parts) -> None:
        self._pid = os.getpid()
        self._events: queue.SimpleQueue[WorldEvent | None] = queue.SimpleQueue()
        self._over = False
        self._failed: Failed | None = None
        self._context = RankContext(self._report)
        self._events.put(Identified((identify(0, os.getpid()),)))
        self._thread = threading.Thread(target=self._run, args=(parts,), name="tllm-engine", daemon=True)
        self._thread.start()

    def _run(self, parts: Parts) -> None:
        try:
            lead(parts, self._context, self._report)
        except BaseException:
            failed = self._failed
            self._events.put(Exited(False, "the engine failed" if failed is None else failed.message, 0))
        else:
            self._events.put(Exited(clean=True))

    def _report(self, message: FromRank) -> None:
        if isinstance(message, Failed):
            self._failed = message
        if isinstance(message, Listening | Phase | Ready | Failed):
            self._events.put(message)

    def events(self, timeout: float | None) -> Sequence[WorldEvent]:
        if self._over or os.getpid() != self._pid:
            return []
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return []
        self._over = isinstance(event, Exited)
        return [] if event is None else [event]

    def wake(self) -> None:
        self._events.put(None)

    def stop(self, timeout: float) -> bool:
        if os.getpid() != self._pid:
            return True
        self._context.end()
        if self._thread is threading.current_thread():
            return False
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def kill(self) -> None:
        self.stop(KILL_S)

    def describe(self) -> dict[str, Plain]:
        return {"launcher": "inline", "engine": f"thread {self._thread.name!r} of process {os.getpid()}"}
