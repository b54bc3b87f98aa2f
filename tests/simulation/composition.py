"""One schedule: engine worlds and frontends on a network, what their callers do, what goes wrong, and how it ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar, Final

from tllm_core import frontend as frontend_module
from tllm_core.contracts.messages import Introduce
from tllm_core.world import pulse as pulse_module

from . import invariants
from .callers import CALLS
from .engines import EngineProcess
from .faults import FAULTS, slow_probe
from .frontends import FrontendProcess
from .links import Lane
from .network import Network
from .settings import Profile, ScheduleSettings, draw
from .timeline import GRAIN_S, Blocked, Process, Timeline
from .violation import Violation
from .watching import SENTINEL_S

SETTLE_S = 9.0
"""By when everything has to have come to rest once all is mended."""
CLOSE_S = 4.0
LOOK_S = 0.03
MAX_STEPS = 60_000
SLOW_PROBES = 0.1
"""Of the schedules with a broker."""


class Simulation:
    """Everything of one schedule. `touched`: whose promises are to be checked after this step."""

    PARKED_SLACK: Final = 4096
    current: ClassVar[Simulation | None] = None

    def __init__(self, seed: int, profile: Profile = "long", *, traced: bool = False) -> None:
        self.seed, self.traced = seed, traced
        self.lines: list[str] = []
        self.dice = random.Random(seed)
        self.settings: ScheduleSettings = draw(self.dice, profile)
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.settings.weather, random.Random(seed + 1))
        self.lanes: dict[int, Lane] = {}
        self.engines: list[EngineProcess] = []
        self.frontends: list[FrontendProcess] = []
        self.touched: dict[Process, None] = {}
        self.generations = self.nested = 0
        self._numbers = 0
        self.mended = False
        self._watched: dict[object, tuple[int, Callable[[], None]]] = {}
        self.may_expel = self._may_expel()
        self.touch = self.touched.setdefault

    def _may_expel(self) -> bool:
        """Bounds so tight that an engine may give up a frontend which does all it can."""
        weather = self.settings.weather
        return not weather.reliable or weather.high_water < 10 or self.settings.worker.parked_bytes < 1 << 16

    # ------------------------------------------------------------------------------------------------------- parts

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def trace(self, text: str, *values: object) -> None:
        if self.traced:
            self.lines.append(f"{self.timeline.now:9.4f}  {text % values}")

    @property
    def engine(self) -> EngineProcess:
        """The newest."""
        return self.engines[-1]

    def start_engine(self) -> EngineProcess:
        self.generations += 1
        generation = self.dice.getrandbits(63)
        engine = EngineProcess(self, generation, random.Random(self.seed + 100 + self.generations))
        self.engines.append(engine)
        self.trace("%s starts: generation %x", engine.name, generation)
        return engine

    def start_frontend(self, *, owner: bool = False, peer: bytes | None = None) -> FrontendProcess:
        process = FrontendProcess(self, self.engine, owner=owner, peer=peer)
        self.frontends.append(process)
        return process

    def lose_owner(self, engine: EngineProcess) -> None:
        """The watcher sees its owner's end: an orderly end of the world, then no patience."""
        engine.break_down()
        self.timeline.later(SENTINEL_S, self._orphan, engine)

    def watch_process(self, who: Introduce, then: Callable[[], None]) -> Callable[[], None]:
        """What the engine's host tells of a frontend's process."""
        key = object()
        self._watched[key] = (who.pid, then)
        return lambda: self._watched.pop(key, None) and None

    def notice_end(self, process: FrontendProcess) -> None:
        for key, (number, then) in list(self._watched.items()):
            if number == process.number:
                del self._watched[key]
                self.timeline.later(self.dice.uniform(0.0, SENTINEL_S), then)

    def _orphan(self, engine: EngineProcess) -> None:
        if engine.runs and not engine.leaving:
            engine.worker.stop()
        self.timeline.later(0.5, engine.crash)

    # ------------------------------------------------------------------------------------------------------ running

    def run(self) -> None:
        """The whole schedule. Raises Violation."""
        Simulation.current = self
        with virtual(self.timeline):
            self._begin()
            self._run_until(self.settings.active_s)
            self._mend()
            self._settle()
            self._close()

    def let_go(self) -> None:
        """Cuts the knots of references, so that the collector finds little."""
        for engine in self.engines:
            for part in (
                engine.port,
                engine.link,
                engine.pulse,
                engine.worker,
                engine.world,
                engine.watcher.port,
                engine.watcher.link,
            ):
                part.__dict__.clear()
            engine.watcher.__dict__.clear()
            engine.__dict__.clear()
        for process in self.frontends:
            for ticket in (*process.open_tickets, *process.ended):
                ticket.result = None
            for part in (process.port, process.link, process.frontend):
                if part is not None:
                    part.__dict__.clear()
            process.__dict__.clear()
        self.network.__dict__.clear()

    def _begin(self) -> None:
        self.start_engine()
        self.start_frontend(owner=True)
        for _ in range(self.settings.attached):
            self.start_frontend()
        active = self.settings.active_s
        for _ in range(self.settings.calls):
            self.timeline.at(self.dice.uniform(0.004, active), self._call)
        for _ in range(self.settings.faults):
            self.timeline.at(self.dice.uniform(0.0, active), self._fault)
        # Dice of its own: all other schedules stay what they were.
        other = random.Random(self.seed + 50)
        if self.network.weather.broker and other.random() < SLOW_PROBES:
            self.timeline.at(other.uniform(0.0, active), slow_probe, self, other)

    def _run_until(self, limit: float) -> None:
        self.timeline.run(limit, self.touched, self._check)
        if self.timeline.steps > MAX_STEPS:
            raise Violation("I10", f"{self.timeline.steps} steps and no end")

    def run_nested(self, seconds: float) -> None:
        """Others run while the current thread is preempted."""
        self.nested += 1
        self.timeline.run(self.timeline.now + seconds)
        self.nested -= 1

    def _check(self) -> None:
        check = invariants.check
        for process in self.touched:
            check(self, process)
        self.touched.clear()

    # -------------------------------------------------------------------------------------------------- what happens

    def _fault(self) -> None:
        fault = self.dice.choice(FAULTS)
        self.trace("fault: %s", fault.__name__)
        fault(self)
        self.touched.update(dict.fromkeys(self.frontends))

    def _call(self) -> None:
        serving = [process for process in self.frontends if process.serves]
        if not serving:
            return
        process = self.dice.choice(serving)
        self.touch(process)
        action = self.dice.choice(CALLS)
        action(self, process)
        self._read_some(process)

    def _read_some(self, process: FrontendProcess) -> None:
        for ticket in (*process.open_tickets, *process.ended):
            if self.chance(process.reads):
                invariants.read(self, process, ticket)

    # ---------------------------------------------------------------------------------------------------- how it ends

    def _mend(self) -> None:
        """No more faults and a calm network; what is frozen or cut comes back at its own time."""
        self.trace("the weather is fine")
        self.mended = True
        self.network.calm_down()
        for engine in self.engines:
            engine.model.may_pause = False
            pause_s = self.dice.uniform(0.0, 2 * self.settings.liveness.hang_after_s)
            self.timeline.later(pause_s, engine.model.resume, engine.worker)

    def _settle(self) -> None:
        """Until all has come to rest, or too long."""
        deadline = self.timeline.now + SETTLE_S
        while True:
            self._run_until(self.timeline.now + LOOK_S)
            if self.timeline.now >= deadline:
                self._judge_rest()
                return
            try:
                self._judge_rest()
            except Violation:
                continue
            return

    def _judge_rest(self) -> None:
        invariants.all_mended(self)
        invariants.all_attached(self)
        invariants.all_ended(self)
        invariants.tables_are_empty(self)
        invariants.lanes_are_idle(self)

    def _close(self) -> None:
        for process in self.frontends:
            if process.alive:
                for ticket in (*process.open_tickets, *process.ended):
                    invariants.read(self, process, ticket)
        invariants.never_reached_the_engine(self)
        for process in self.frontends:
            if process.alive and not process.owner:
                process.close()
        deadline = self.timeline.now + CLOSE_S
        self._wait(deadline, invariants.sessions_are_gone_but_the_owners)
        for process in self.frontends:
            if process.alive and process.owner:
                process.close()
        self._wait(deadline + CLOSE_S, invariants.worlds_are_gone)

    def _wait(self, deadline: float, promise: Callable[[Simulation], None]) -> None:
        while True:
            self._run_until(self.timeline.now + LOOK_S)
            try:
                promise(self)
            except Violation:
                if self.timeline.now >= deadline:
                    raise
                continue
            return


class UnstartedThread:
    """Its target is an actor's turn."""

    def __init__(self, **options: object) -> None:
        """Whatever a thread is made with."""

    def start(self) -> None:
        """Nothing: the actor is woken by who made it."""

    def join(self) -> None:
        """Nothing: it ends with its process."""

    def is_alive(self) -> bool:
        return False


class Flag:
    """An event for which no simulated thread waits."""

    __slots__ = ("_set",)

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


@contextmanager
def virtual(timeline: Timeline) -> Iterator[None]:
    """`core/frontend.py` and `core/world/pulse.py` read the clock and make their threads by themselves."""

    def sleep(seconds: float) -> None:
        raise Blocked(timeline.now + seconds + GRAIN_S)

    modules = (frontend_module, pulse_module)
    real = [(module.time, module.threading) for module in modules]
    for module in modules:
        module.time = SimpleNamespace(monotonic=timeline.clock, sleep=sleep)
        module.threading = SimpleNamespace(
            Thread=UnstartedThread, Lock=threading.Lock, Event=Flag, current_thread=threading.current_thread
        )
    try:
        yield
    finally:
        for module, (clock, threads) in zip(modules, real, strict=True):
            module.time, module.threading = clock, threads
