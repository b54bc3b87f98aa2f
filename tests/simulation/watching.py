"""The watcher of an engine world: the real liveness rules over what it sees of the ranks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tllm_core.contracts.interfaces import Beaten, Exited, Failed
from tllm_core.contracts.messages import Beat, Obituary, RankState, Stopping
from tllm_core.wire.liveness import Liveness, Verdict

from .links import SimEngineLink
from .model import INFO
from .network import EnginePort
from .timeline import Actor, Process
from .violation import Violation

if TYPE_CHECKING:
    from .composition import Simulation
    from .engines import EngineProcess, FollowerProcess

SENTINEL_S = 0.02
"""A process's death is noticed on its host within this."""
FLUSH_S = 0.3
SLACK_S = 0.25
"""Two beats, and a step."""


def state_of(rank: Process) -> RankState:
    if not rank.alive:
        return RankState.GONE
    return RankState.RUNNING if rank.frozen_at is None else RankState.STOPPED


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
        self.disturbed = False
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
        ranks = (self.engine, *self.engine.ranks)
        cpu_s = (self.engine.used_cpu_s(), *[0.0] * (len(ranks) - 1))
        beat = Beat(self._beats, steps, busy, tuple(map(state_of, ranks)), cpu_s)
        if not self._told:
            self.engine.world.put(Beaten(beat))
            self.link.beat(beat)
            self._judge(beat, self.timeline.now)
            self.beater.wake(self.timeline.now + self.sim.settings.liveness.beat_interval_s)

    def _judge(self, beat: Beat, now: float) -> None:
        """A rank that is stopped for too long is ended, and an engine that hangs where the settings say so."""
        self._liveness.beat(beat, now)
        verdict, engine = self._liveness.poll(now, path_ok_at=now), self.engine
        if verdict is None and self._liveness.settings.end_hung:
            verdict = self._liveness.hung
        self._check_hang(self._liveness.hung)
        if verdict is not None and engine.alive and not engine.leaving:
            self._tell(Failed(verdict.message, verdict.rank))
            if verdict.rank is not None:
                engine.broken_ranks.add(verdict.rank)
            engine.crash()

    def _check_hang(self, hung: Verdict | None) -> None:
        """I12: no step and no computation for long is a hang; a pause, a computation or a short wait is none."""
        engine, after_s = self.engine, self.sim.settings.liveness.hang_after_s
        if engine.frozen_at is not None or not engine.alive or self.disturbed:
            return
        if hung is not None and engine.hangs_for_s < after_s - SLACK_S:
            raise Violation("I12", f"{engine.name} counts as hung after {engine.hangs_for_s:.2f} s: {hung.message}")
        if hung is None and engine.hangs_for_s > after_s + SLACK_S:
            raise Violation("I12", f"{engine.name} has hung for {engine.hangs_for_s:.2f} s, and nobody noticed")

    def freeze(self) -> None:
        super().freeze()
        self.disturbed = True

    def bury_rank(self, follower: FollowerProcess) -> None:
        """Any rank's end is the world's."""
        if self.alive and self.frozen_at is not None:
            self.timeline.later(SENTINEL_S, self.bury_rank, follower)
        elif self.alive and self.engine.alive and not self.engine.leaving:
            self._tell(Failed(f"engine rank {follower.rank} was killed", follower.rank, exitcode=-9))
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
