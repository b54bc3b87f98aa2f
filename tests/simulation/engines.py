"""An engine world: one rank with the real worker, and the watcher beside it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, World, WorldEvent
from tllm_core.contracts.messages import Abort, Beat, Obituary, RankState, Stopping
from tllm_core.wire.liveness import Liveness
from tllm_core.world.words import failed_of
from tllm_core.world.worker import Worker

from .links import SimEngineLink
from .model import INFO, Model
from .network import EnginePort
from .timeline import GRAIN_S, NEVER, Actor, Blocked, Process
from .violation import Violation

if TYPE_CHECKING:
    from .composition import Simulation

SENTINEL_S = 0.02
"""A process's death is noticed on its host within this."""
FLUSH_S = 0.3
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
        self.worker = Worker(
            self.model,
            self.link,
            INFO,
            settings=settings.worker,
            progress=self._note,
            watch=sim.watch_process,
            clock=sim.timeline.clock,
        )
        self.port.process = self
        self.port.actor = self.actor = Actor(self, self._turn, sim.touch)
        self.actor.wake(sim.timeline.now)
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

    def _turn(self) -> None:
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

        self.break_down()
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

    def break_down(self) -> None:
        self.disturbed = True
        if self.broken_since is None:
            self.broken_since = self.timeline.now

    def crash(self) -> None:
        if self.alive:
            self.clean = False
            self.break_down()
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


class WatcherProcess(Process):
    """Beats, rank states and the obituary, to the owner's channel and to every attached frontend's second session."""

    def __init__(self, sim: Simulation, engine: EngineProcess, rng: random.Random) -> None:
        super().__init__(sim.timeline, f"watcher {sim.generations}")
        self.sim, self.engine = sim, engine
        settings = sim.settings
        self.port = EnginePort(sim.network, "watcher", sim.dice.getrandbits(63))
        self.link = SimEngineLink(
            self.port,
            sim.lanes,
            rng,
            owner=b"",
            info=INFO,
            by_reference=settings.by_reference,
            settings=replace(settings.wire, window_frames=8, backlog_frames=8),
            liveness=settings.liveness,
        )
        self.port.actor = self.actor = Actor(self, self._turn, sim.touch)
        self.port.process = self
        self.beater = Actor(self, self._beat, sim.touch)
        self._beats, self._told, self._leaving = 0, False, False
        self._liveness = Liveness(settings.liveness)
        self.actor.wake(self.timeline.now)
        self.beater.wake(self.timeline.now)

    def _turn(self) -> None:
        if self._leaving:
            self.link.close(FLUSH_S)
            self.alive = False
            return
        while True:
            self.link.receive(None)

    def _beat(self) -> None:
        self._beats += 1
        steps, busy = self.engine.progress
        state = RankState.GONE if not self.engine.alive else RankState.RUNNING
        if self.engine.alive and self.engine.frozen_at is not None:
            state = RankState.STOPPED
        beat = Beat(self._beats, steps, busy, (state,), (self.timeline.now,))
        if not self._told:
            self.engine.world.put(Beaten(beat))
            self.link.beat(beat)
            self._judge(beat, self.timeline.now)
            self.beater.wake(self.timeline.now + self.sim.settings.liveness.beat_interval_s)

    def _judge(self, beat: Beat, now: float) -> None:
        """A rank that is stopped for too long is ended."""
        self._liveness.beat(beat, now)
        verdict = self._liveness.poll(now, path_ok_at=now)
        if verdict is not None and self.engine.alive and not self.engine.leaving:
            self._tell(Failed(verdict.message, verdict.rank))
            self.engine.crash()

    def hear(self, words: Failed | None) -> None:
        """What the rank itself reported."""
        if self.runs and words is not None:
            self._tell(words)

    def bury(self) -> None:
        """The rank is gone: by its pidfd, as soon as this process runs."""
        if not self.alive:
            return
        if self.frozen_at is not None:
            self.timeline.later(SENTINEL_S, self.bury)
            return
        engine = self.engine
        message = "engine rank 0 was killed"
        if not engine.clean:
            self._tell(engine.words or Failed(message, rank=0, exitcode=-9))
        elif not self._told:
            self.link.broadcast(Stopping())
        self.engine.world.put(Exited(engine.clean, "" if engine.clean else message, 0))
        self._leaving = self._told = True
        self.actor.wake(self.timeline.now)

    def _tell(self, words: Failed) -> None:
        if not self._told:
            self._told = True
            self.engine.world.put(words)
            self.link.broadcast(Obituary(words.message, words.rank, words.exitcode))

    def crash(self) -> None:
        """The parent-death signal takes the rank along; the owner sees its channel end."""
        if not self.alive:
            return
        self.alive = False
        self.port.close()
        self.engine.break_down()
        self.timeline.later(self.sim.dice.uniform(0.0, SENTINEL_S), self._orphan)

    def _orphan(self) -> None:
        self.engine.crash()
        if not self._leaving:
            self.engine.world.put(Failed("the engine's watcher was killed", exitcode=-9))
            self.engine.world.put(Exited(False, "the engine's watcher was killed", exitcode=-9))
