"""The real pulse of an engine, whose thread is an actor beside the worker's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tllm_core.contracts.messages import UpMessage
from tllm_core.world.pulse import AFTER_S, Pulse

from .timeline import NEVER, Actor, Blocked
from .violation import Violation

if TYPE_CHECKING:
    from .engines import EngineProcess

UNREAD_S = AFTER_S + 0.02
"""How long a frame may wait at an engine that is in a step."""


class TurnLock:
    """A lock of actors. Who is blocked in the middle of what it guards keeps it, as a thread would.

    `caller`: whose turn it is. `taken`: called with whoever got it.
    """

    def __init__(self, taken: Callable[[Actor], None]) -> None:
        self.caller: Actor | None = None
        self.holder: Actor | None = None
        self._taken = taken
        self._waiting: list[Actor] = []

    def acquire(self, blocking: bool = True) -> bool:
        if self.holder not in (None, self.caller):
            if not blocking:
                return False
            self._waiting.append(self.caller)
            raise Blocked(NEVER)
        self.holder = self.caller
        self._taken(self.caller)
        return True

    def release(self) -> None:
        if sys.exc_info()[0] is Blocked:
            return
        self.holder = None
        waiting, self._waiting = self._waiting, []
        for actor in waiting:
            actor.wake(actor.process.timeline.now)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Bell:
    """The event on which the thread is parked."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._rung = actor, False

    def set(self) -> None:
        self._rung = True
        self._actor.wake(self._actor.process.timeline.now)

    def clear(self) -> None:
        self._rung = False

    def wait(self) -> None:
        if not self._rung:
            raise Blocked(NEVER)


class SimPulse(Pulse):
    """`receive` and `busy` are the worker's; a turn of the thread that was blocked goes on where it was."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__(SimpleNamespace(receive=self._read_lane, wake=engine.link.wake))
        self._engine = engine
        self.actor = Actor(engine, self._run, engine.sim.touch)
        self.actor.ends = True
        self._reading = TurnLock(self._take_over)
        self._began = Bell(self.actor)
        self.actor.wake(engine.timeline.now)

    def _take_over(self, actor: Actor) -> None:
        self._engine.port.actor = actor

    def receive(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        self._reading.caller = self._engine.actor
        link = self._engine.link
        link.act_upon()
        messages = super().receive(timeout)
        link.check_order(messages)
        return messages

    def _turn(self) -> None:
        self._reading.caller = self.actor
        if self._is_parked:
            self._park()
        elif self._reading.holder is self.actor:
            with self._reading:
                self._read()
        else:
            super()._turn()

    def _read_lane(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        """I12: a long step is no death, and so the lane is read all the same."""
        engine = self._engine
        waited = engine.timeline.now - max(engine.port.oldest_at, engine.awake_since)
        if engine.port.oldest_at != NEVER and waited > UNREAD_S:
            raise Violation("I12", f"{engine.name} left its lane unread for {waited:.2f} s")
        return engine.link.read(timeout)
