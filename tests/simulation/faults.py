"""What goes wrong: processes, paths, attaches, and frames that do not belong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tllm_core.contracts.messages import Hello
from tllm_core.wire.header import HELLO, WIRE_VERSION, Seal

from .hostile import inject
from .links import KEY
from .network import FrontendPort, Port, SlowProbe
from .timeline import Process

if TYPE_CHECKING:
    from .composition import Simulation
    from .frontends import FrontendProcess

SHORT_S = (0.01, 0.15)
LONG_PROMPT = 400
LONG = (1.25, 2.25)
"""Freezes that count as death, in deadlines."""


def long_s(sim: Simulation) -> float:
    return sim.settings.liveness.dead_after_s * sim.dice.uniform(*LONG)


def freeze_for(sim: Simulation, process: Process, seconds: float) -> None:
    sim.trace("%s freezes for %.2f s", process.name, seconds)
    process.freeze()
    sim.timeline.later(seconds, process.thaw)


def kill_engine(sim: Simulation) -> None:
    sim.engine.crash()
    if sim.chance(0.5):
        sim.timeline.later(sim.dice.uniform(0.0, 0.3), restart, sim)


def restart(sim: Simulation) -> None:
    """A new generation under the old address; what is still on its way to the old one reaches it."""
    if sim.mended:
        return
    sim.engine.crash()
    sim.start_engine()
    sim.start_frontend(owner=True)
    if sim.chance(0.5):
        sim.start_frontend()


def freeze_engine(sim: Simulation) -> None:
    freeze_for(sim, sim.engine, sim.dice.uniform(*SHORT_S))


def freeze_engine_for_long(sim: Simulation) -> None:
    """As good as dead; half of the time a new generation is there before it thaws."""
    engine = sim.engine
    if engine.runs:
        engine.break_down(0)
        freeze_for(sim, engine, long_s(sim))
        if sim.chance(0.3):
            freeze_for(sim, engine.watcher, long_s(sim))
        if sim.chance(0.3):
            sim.timeline.later(1.1 * sim.settings.liveness.dead_after_s, supersede, sim)


def supersede(sim: Simulation) -> None:
    """A new generation beside one that is only frozen."""
    if sim.mended:
        return
    sim.start_engine()
    sim.start_frontend(owner=True)


def stick_engine(sim: Simulation) -> None:
    """A step that takes long: it computes, or it hangs."""
    seconds = sim.settings.liveness.hang_after_s * sim.dice.uniform(0.3, 2.5)
    sim.engine.stick(seconds, computes=sim.chance(0.4))


def kill_rank(sim: Simulation) -> None:
    for follower in sim.engine.ranks:
        follower.crash()


def freeze_rank(sim: Simulation) -> None:
    engine = sim.engine
    for follower in engine.ranks:
        if follower.runs and engine.runs:
            engine.break_down(follower.rank)
            freeze_for(sim, follower, long_s(sim))


def kill_watcher(sim: Simulation) -> None:
    sim.engine.watcher.crash()


def freeze_watcher(sim: Simulation) -> None:
    freeze_for(sim, sim.engine.watcher, sim.dice.uniform(*SHORT_S))


def kill_frontend(sim: Simulation) -> None:
    process = sim.dice.choice(sim.frontends)
    if not process.owner or sim.chance(0.2):
        process.crash()


def freeze_frontend(sim: Simulation) -> None:
    process = sim.dice.choice(sim.frontends)
    freeze_for(sim, process, long_s(sim) if sim.chance(0.33) else sim.dice.uniform(*SHORT_S))


def cut_path(sim: Simulation) -> None:
    _break_path(sim, FrontendPort.cut)


def stall_path(sim: Simulation) -> None:
    _break_path(sim, FrontendPort.stall)


def _break_path(sim: Simulation, how: Callable[[FrontendPort], None]) -> None:
    process, seconds = sim.dice.choice(sim.frontends), outage_s(sim)
    if not process.serves or sim.chance(0.5):
        process.break_path(how)
        sim.timeline.later(seconds, process.mend_path)
        return
    process.submit()  # so that something is on its way
    after_s = sim.dice.uniform(0.0, 0.05)
    sim.timeline.later(after_s, process.break_path, how)
    sim.timeline.later(after_s + seconds, process.mend_path)


def outage_s(sim: Simulation) -> float:
    """Most are short; some are long enough to count as a loss."""
    if sim.chance(0.75 if sim.settings.profile == "long" else 0.85):
        return sim.dice.uniform(0.01, 0.4)
    return sim.settings.liveness.dead_after_s * sim.dice.uniform(0.9, 3.6)


def break_broker(sim: Simulation) -> None:
    """Everybody's path at once; they come back one after the other."""
    how = sim.dice.choice((Port.cut, Port.stall))
    seconds = sim.settings.liveness.dead_after_s * sim.dice.uniform(0.3, 3.6)
    for process in sim.frontends:
        process.break_path(how)
        sim.timeline.later(seconds + sim.dice.uniform(0.0, 0.1), process.mend_path)
    if sim.network.weather.broker:
        break_engine_side(sim, how, seconds)


def cut_engine(sim: Simulation) -> None:
    """The engine's own way to the broker, and its watcher's; nobody else's."""
    if sim.network.weather.broker:
        break_engine_side(sim, sim.dice.choice((Port.cut, Port.stall)), outage_s(sim))


def break_engine_side(sim: Simulation, how: Callable[[Port], None], seconds: float) -> None:
    engine = sim.engine
    engine.disturbed = True
    for port in (engine.port, engine.watcher.port):
        how(port)
        sim.timeline.later(seconds + sim.dice.uniform(0.0, 0.1), port.mend)


def slow_probe(sim: Simulation, dice: random.Random) -> None:
    """A frontend's path is proven late, again and again, and perhaps its engine's host goes without a word meanwhile."""
    process, liveness = sim.frontends[dice.randrange(len(sim.frontends))], sim.settings.liveness
    if not sim.network.weather.broker or not process.serves:
        return
    each_s = liveness.broker_down_after_s * dice.uniform(0.3, 0.45)
    probe = SlowProbe(sim.timeline.now, each_s, sim.timeline.now + each_s * dice.randrange(1, 9))
    sim.trace("%s: proofs of its path take %.2f s until %.2f", process.name, each_s, probe.until)
    for port in process.ports:
        port.slow_probe = probe
    engine = process.engine
    if dice.random() < 0.5 and engine.runs:
        engine.break_down(0)
        for part in (engine, engine.watcher):
            freeze_for(sim, part, 2.2 * liveness.broker_down_after_s)


def storm(sim: Simulation) -> None:
    """Attaches that never speak again."""
    generation = sim.engine.generation
    key = None if sim.settings.by_reference else KEY
    seal = Seal(key, generation, 0, down=False)
    terms = sim.engine.link._terms
    for _ in range(sim.dice.randrange(3, 12)):
        peer = b"\x02" + sim.dice.randbytes(15)
        hello = Hello(WIRE_VERSION, WIRE_VERSION, peer, sim.dice.randbytes(16))
        kind, payload = terms.special(hello)
        assert kind == HELLO
        sim.engine.port.put(seal.frame(kind, payload))


def come_back(sim: Simulation) -> None:
    """The same peer begins anew, with its earlier session still open or long ended."""
    process = sim.dice.choice(sim.frontends)
    if process.alive and not process.owner and process.engine is sim.engine:
        if process.serves and sim.chance(0.5):
            process.submit(rest=LONG_PROMPT)
            sim.timeline.later(sim.dice.uniform(0.0, 0.02), begin_anew, sim, process)
        else:
            begin_anew(sim, process)


def begin_anew(sim: Simulation, process: FrontendProcess) -> None:
    """Perhaps in the middle of a message."""
    if process.alive and not sim.mended and process.engine is sim.engine:
        process.crash()
        sim.start_frontend(peer=process.peer)


def attach_more(sim: Simulation) -> None:
    if len(sim.frontends) < 6:
        sim.start_frontend()


FAULTS: tuple[Callable[[Simulation], None], ...] = (
    kill_engine,
    restart,
    freeze_engine,
    freeze_engine_for_long,
    stick_engine,
    stick_engine,
    kill_rank,
    freeze_rank,
    kill_watcher,
    freeze_watcher,
    kill_frontend,
    freeze_frontend,
    freeze_frontend,
    cut_path,
    cut_path,
    stall_path,
    break_broker,
    cut_engine,
    storm,
    come_back,
    attach_more,
    *(inject,) * 5,
)
