"""An engine world: rank 0 with the real worker, perhaps another rank, and the watcher beside them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tllm_core.contracts.interfaces import Beaten, Failed, World, WorldEvent
from tllm_core.contracts.messages import Abort
from tllm_core.world.words import failed_of
from tllm_core.world.worker import Worker

from .links import SimEngineLink
from .model import INFO, Model
from .network import EnginePort
from .pulses import SimPulse
from .timeline import GRAIN_S, NEVER, Actor, Blocked, Process
from .violation import Violation
from .watching import FLUSH_S, SENTINEL_S, WatcherProcess

if TYPE_CHECKING:
    from .composition import Simulation

OWNER = b"o" * 16
BEATS_KEPT = 4


class SimWorld(World):
    """What the owner hears of its world, and the one event queue that its watching thread reads."""

    def __init__(self, sim: Simulation, engine: EngineProcess) -> None:
        self.sim, self.engine = sim, engine
        self.actor: Actor | None = None
        self.closer: Actor | None = None
        self._stop_until: float | None = None
        self._queue: deque[WorldEvent] = deque()
        self._until: float | None = None

    def put(self, event: WorldEvent) -> None:
        """Beats are dropped where the owner does not read."""
        if isinstance(event, Beaten) and len(self._queue) >= BEATS_KEPT:
            return
        self._queue.append(event)
        self.wake()

    def events(self, timeout: float | None) -> Sequence[WorldEvent]:
        now = self.sim.timeline.now
        if self._until is None:
            self._until = NEVER if timeout is None else now + timeout
        if not self._queue and now < self._until:
            raise Blocked(self._until + GRAIN_S)
        self._until = None
        events = list(self._queue)
        self._queue.clear()
        return events

    def wake(self) -> None:
        if self.actor is not None:
            self.actor.wake(self.sim.timeline.now)

    def path_ok_at(self) -> float:
        return self.sim.timeline.now

    def stop(self, timeout: float) -> bool:
        """Waits, as the launchers' do, while the frontend's other threads read on."""
        now = self.sim.timeline.now
        if self._stop_until is None:
            self._stop_until = now + timeout
        if self.engine.alive and now < self._stop_until:
            raise Blocked(self._stop_until + GRAIN_S)
        return not self.engine.alive

    def kill(self) -> None:
        self.engine.crash()


class FollowerProcess(Process):
    """A rank that only follows: that it runs is all that matters here."""

    def __init__(self, engine: EngineProcess, rank: int) -> None:
        super().__init__(engine.timeline, f"rank {rank} of {engine.name}")
        self.engine, self.rank = engine, rank

    def crash(self) -> None:
        if self.alive and self.engine.alive:
            super().crash()
            self.engine.break_down(self.rank)
            self.timeline.later(self.engine.sim.dice.uniform(0.0, SENTINEL_S), self.engine.watcher.bury_rank, self)


class EngineProcess(Process):
    """Rank 0 of one generation. `broken_since`: from when on its death is true; None while it is well.

    `disturbed`: it was frozen, or has gone, and may have given frontends up that did all they could.
    """

    def __init__(self, sim: Simulation, generation: int, rng: random.Random) -> None:
        super().__init__(sim.timeline, f"engine {sim.generations}")
        self.sim, self.generation = sim, generation
        settings = sim.settings
        self.port = EnginePort(sim.network, "engine", generation)
        self.link = SimEngineLink(
            self.port,
            sim.lanes,
            rng,
            owner=OWNER,
            info=INFO,
            by_reference=settings.by_reference,
            settings=settings.wire,
            liveness=settings.liveness,
        )
        self.model = Model(rng)
        self.model.wait = self._stick
        self.stuck_until, self.stuck_since, self.computes = 0.0, 0.0, False
        self.in_step = False
        self.cpu_s = 0.0
        self.ranks = [FollowerProcess(self, rank) for rank in range(1, settings.world_size)]
        self.broken_ranks: set[int | None] = set()
        self.port.process = self
        self.port.actor = self.actor = Actor(self, self._turn, sim.touch)
        self.actor.wake(sim.timeline.now)
        self.pulse = SimPulse(self)
        self.worker = Worker(
            self.model,
            self.link,
            INFO,
            settings=settings.worker,
            progress=self._note,
            watch=sim.watch_process,
            pulse=self.pulse,
            clock=sim.timeline.clock,
        )
        self.progress = (0, False)
        self.awake_since = self.timeline.now
        self.broken_since: float | None = None
        self.exited_at: float | None = None
        self.leaving = self.clean = self.disturbed = False
        self.words: Failed | None = None
        self.watcher = WatcherProcess(sim, self, rng)
        self.world = SimWorld(sim, self)

    def _note(self, steps: int, busy: bool) -> None:
        self.progress = (steps, busy)

    def stick(self, seconds: float, computes: bool) -> None:
        """A step that begins within so many seconds takes until then: for a computation, or for nothing."""
        if self.timeline.now < self.stuck_until:
            return
        self.disturbed = True
        self.stuck_until, self.computes = self.timeline.now + seconds, computes

    def _stick(self) -> None:
        if self.timeline.now < self.stuck_until:
            if not self.in_step:
                self.in_step, self.stuck_since = True, self.timeline.now
            self.worker._woken = True  # the step goes on where it was
            raise Blocked(self.stuck_until)
        if self.in_step:
            self.cpu_s = self.used_cpu_s()
            self.in_step = False

    @property
    def hangs_for_s(self) -> float:
        """How long it has been in a step that does nothing."""
        now = self.timeline.now
        is_stuck = self.in_step and now < self.stuck_until and not self.computes
        return now - self.stuck_since if self.progress[1] and is_stuck else 0.0

    def used_cpu_s(self) -> float:
        if self.computes and self.in_step:
            return self.cpu_s + min(self.timeline.now, self.stuck_until) - self.stuck_since
        return self.cpu_s

    def _turn(self) -> None:
        if self.in_step:
            self._stick()
        if self.leaving:
            self._leave()
            return
        worker = self.worker
        while True:
            try:
                worker._turn()
            except Exception as error:
                self._fail(error)
                return
            self._check_aborts()
            if worker._stopping:
                self._run_out()
                return
            if worker._again:
                self.actor.wake(self.timeline.now + self.sim.settings.step_s)
                return

    def _check_aborts(self) -> None:
        """I8: an abort that was read has freed what its request held."""
        for session, message in self.link.in_hand:
            if isinstance(message, Abort):
                outbox = self.worker._outboxes.get(session)
                if outbox is not None and message.client_id in outbox.requests:
                    raise Violation("I8", f"{self.name} goes on with request {message.client_id} after its abort")

    def _fail(self, error: Exception) -> None:
        """The loop's end in `Worker.run`, then what the rank does with it."""

        def raises() -> None:
            raise error

        self.break_down(0)
        self.words = failed_of(error, 0)
        self.worker._turn = raises
        self._run_out()

    def _run_out(self) -> None:
        self.break_down()
        try:
            self.worker.run()
            self.clean = True
        except Exception:
            self.clean = False
        self.watcher.hear(self.words)
        self.port.actor = self.actor
        self.pulse.close()
        self.leaving = True
        self._leave()

    def _leave(self) -> None:
        self.link.close(FLUSH_S)
        self.exit()

    def freeze(self) -> None:
        super().freeze()
        self.disturbed = True

    def thaw(self) -> None:
        super().thaw()
        self.awake_since = self.timeline.now

    def break_down(self, rank: int | None = None) -> None:
        self.disturbed = True
        self.broken_ranks.add(rank)
        if self.broken_since is None:
            self.broken_since = self.timeline.now

    def crash(self) -> None:
        if self.alive:
            self.clean = False
            self.break_down(0)
            self.exit()

    def exit(self) -> None:
        """Gone from the host; its port with it."""
        if self.alive:
            self.alive = False
            self.exited_at = self.timeline.now
            self.port.keep_open = False
            self.port.close()
            self.sim.trace("%s is gone", self.name)
            if self.world.closer is not None:
                self.world.closer.wake(self.timeline.now)
            self.timeline.later(self.sim.dice.uniform(0.0, SENTINEL_S), self.watcher.bury)
