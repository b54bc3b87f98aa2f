"""One rank: from a WorldSpec to a working engine. Runs in a process of its own, or in a thread of the inline launcher."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec import Struct

from tllm_core.config import convert_options
from tllm_core.contracts.interfaces import (
    Engine,
    EngineContext,
    EngineSpec,
    Identity,
    Listening,
    Phase,
    Ready,
    WorldSpec,
)
from tllm_core.contracts.messages import EngineInfo, Introduce
from tllm_core.registry import Registry, load_object
from tllm_core.world.budget import BudgetExhausted
from tllm_core.world.calls import declared
from tllm_core.world.channel import Adopted, FromRank, Leaving, Prepared
from tllm_core.world.lane import engine_link, liveness_of, transport_of, wire_of
from tllm_core.world.process import host_id
from tllm_core.world.progress import UNREAD, Unread
from tllm_core.world.pulse import Pulse
from tllm_core.world.vigil import Then, Vigil
from tllm_core.world.words import failed_of
from tllm_core.world.worker import Worker, WorkerSettings

log = logging.getLogger(__name__)

FLUSH_S = 1.0
"""How long an ending engine waits for its last words to be acknowledged."""

Report = Callable[[FromRank], None]


class Parts(Struct, frozen=True):
    """What a WorldSpec names, found and checked."""

    spec: WorldSpec
    engine: EngineSpec
    settings: Any
    world_size: int


def resolve(spec: WorldSpec) -> Parts:
    """Finds the engine and converts its options. Raises ConfigError or PluginError."""
    engine = Registry().engine(spec.engine)
    settings = convert_options(engine.settings_type, spec.engine_options, f"engine.{engine.name}")
    world_size = 1 if engine.world_size is None else load_object(engine.world_size)(settings)
    return Parts(spec, engine, settings, world_size)


class RankContext(EngineContext):
    """What an engine may ask of its world, and where the world's wish to end reaches it."""

    def __init__(
        self,
        report: Report,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: str | None = None,
        rendezvous_fd: int | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.rendezvous, self.rendezvous_fd = rendezvous, rendezvous_fd
        self.ended = False
        self._report = report
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._woken = False

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            if self._worker is not None:
                self._worker.wake()

    def phase(self, name: str, done: float | None = None) -> None:
        self._report(Phase(self.rank, name, done))

    def adopt(self, pid: int) -> None:
        self._report(Adopted(pid))

    def end(self) -> None:
        """Stops the worker in an orderly way, now or as soon as there is one."""
        with self._lock:
            self.ended = True
            if self._worker is not None:
                self._worker.stop()

    def attach(self, worker: Worker) -> None:
        """From now on `wake` and `end` reach this worker; earlier ones are made up for."""
        with self._lock:
            self._worker = worker
            if self._woken:
                worker.wake()
            if self.ended:
                worker.stop()


def watch_visitor(vigil: Vigil, host: str, who: Introduce, then: Then) -> Then:
    """Watches a frontend's process where it is on this host, and another than this one; elsewhere its silence tells."""
    if not host or who.host != host or who.pid == os.getpid():
        return lambda: None
    return vigil.watch(Identity(-1, who.pid, who.start_time), then)


def lead(parts: Parts, context: RankContext, report: Report, progress: Unread = UNREAD) -> None:
    """Rank 0: listens, prepares, loads and works until it is told to stop. progress: what its watcher reads.

    Whatever goes wrong is reported before anything is closed, and raised.
    """
    with ExitStack() as closers:
        try:
            transport = transport_of(parts.spec)
            port = transport.listen(parts.spec.engine_name, parts.spec.generation)
            closers.callback(port.close)
            report(Listening(port.address))
            if parts.engine.prepare is not None:
                load_object(parts.engine.prepare)(parts.settings, context.phase)
            report(Prepared())
            engine, info = _start(parts, context, closers)
            link = engine_link(parts.spec, transport, port, info, owner=parts.spec.owner)
            closers.callback(link.close, FLUSH_S)
            pulse = Pulse(link)
            closers.callback(pulse.close)
            vigil = Vigil()
            closers.callback(vigil.close)
            worker = Worker(
                engine,
                link,
                info,
                world_size=parts.world_size,
                settings=_worker_settings(parts.spec),
                progress=progress.note,
                excuse=progress.excuse,
                watch=partial(watch_visitor, vigil, host_id()),
                pulse=pulse,
            )
            context.attach(worker)
            report(Ready(info))
            try:
                worker.run()
            except BudgetExhausted:
                # The requests that failed hear of their own errors before anybody hears of the end.
                pulse.close()
                link.close(FLUSH_S)
                raise
            report(Leaving())
        except BaseException as error:
            report(failed_of(error, 0))
            raise


def _worker_settings(spec: WorldSpec) -> WorkerSettings:
    wire, liveness = wire_of(spec), liveness_of(spec)
    return WorkerSettings(
        parked_bytes=wire.parked_bytes,
        stall_after_s=wire.stall_after_s,
        error_budget=liveness.error_budget,
        error_budget_window_s=liveness.error_budget_window_s,
    )


def follow(parts: Parts, context: RankContext, report: Report) -> None:
    """A rank above 0: loads, and works as rank 0 directs it."""
    with ExitStack() as closers:
        try:
            engine, info = _start(parts, context, closers)
            report(Ready(info))
            engine.follow()
            report(Leaving())
        except SystemExit:
            report(Leaving())
        except BaseException as error:
            report(failed_of(error, context.rank))
            raise


def _start(parts: Parts, context: RankContext, closers: ExitStack) -> tuple[Engine, EngineInfo]:
    engine: Engine = load_object(parts.engine.load)(parts.settings)
    closers.callback(_close, engine)
    return engine, declared(engine.start(context))


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except Exception:
        log.exception("the engine did not close in an orderly way")
