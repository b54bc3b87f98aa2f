"""The owner's wait for a world to get ready, which ends also where the world is dead or stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from tllm_core.contracts.interfaces import (
    Beaten,
    EngineAddress,
    Exited,
    Failed,
    Identified,
    Identity,
    Listening,
    Phase,
    Ready,
    World,
    WorldEvent,
)
from tllm_core.errors import BrokerLost, Cause, EngineStartError
from tllm_core.wire.liveness import Liveness, LivenessSettings

TICK_S = 0.1
"""How often it is judged at least whether the world still gets on."""

OnPhase = Callable[[Phase], None]


class Start(Struct):
    """What a world said of itself before it was ready. watcher: the process that beats, beside the ranks."""

    address: EngineAddress
    ranks: tuple[Identity, ...]
    watcher: Identity | None = None
    watcher_address: EngineAddress | None = None


class Starting:
    """A world on its way to Ready. From Listening on, its watcher imports nothing any more: then silence counts as death, as it
    does later. Not for several threads."""

    def __init__(self, world: World, liveness: LivenessSettings, on_phase: OnPhase | None = None) -> None:
        self._world, self._on_phase = world, on_phase
        self._liveness = Liveness(liveness)
        # A judge that looks at most twice within a deadline would take itself for frozen.
        self._tick_s = min(TICK_S, liveness.dead_after_s / 8)
        self._identified = Identified(())
        self._listening: Listening | None = None
        self._beats = self._is_ready = False

    def wait(self) -> Start:
        """Blocks until Ready. Raises EngineStartError with the child's own error if the world fails, ends or freezes before;
        BrokerLost where it is out of reach."""
        while not self._is_ready:
            self.look(self._tick_s)
        if self._listening is None:
            raise EngineStartError(Cause("the engine is ready, but said no address"))
        identified, listening = self._identified, self._listening
        return Start(listening.address, identified.ranks, identified.watcher, listening.watcher)

    def look(self, timeout: float = 0.0) -> None:
        """Takes what the world says within `timeout` seconds, and judges it. Raises as `wait` does."""
        for event in self._world.events(timeout):
            self._take(event)
        self._judge()

    def _take(self, event: WorldEvent) -> None:
        match event:
            case Identified():
                self._identified = event
            case Listening():
                self._listening = event
            case Phase() if self._on_phase is not None:
                self._on_phase(event)
            case Beaten():
                self._beats = True
                self._liveness.beat(event.beat, time.monotonic())
            case Failed() | Exited():
                raise EngineStartError(event.cause())
            case Ready():
                self._is_ready = True

    def _judge(self) -> None:
        if self._listening is None or not self._beats:
            return
        verdict = self._liveness.poll(time.monotonic(), self._world.path_ok_at())
        if verdict is not None and verdict.kind == "broker_down":
            raise BrokerLost(verdict.message)
        if verdict is not None:
            raise EngineStartError(verdict.cause())
