"""A frontend's process: the real `Frontend`, whose two threads are actors, and what its callers do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tllm_core.contracts.interfaces import Exited, Failed, World
from tllm_core.contracts.messages import DownMessage, GenerationRequest, Introduce, SamplingParams, TokenIds
from tllm_core.errors import (
    EngineDeadError,
    ExecutorClosedError,
    Overloaded,
    Refused,
    TllmError,
    TransportError,
)
from tllm_core.frontend import DRAIN_S, Frontend
from tllm_core.ledger.ledger import Call, Effects, Outcome
from tllm_core.ledger.result import GenerationResult
from tllm_core.wire.liveness import Liveness
from tllm_core.world.attached import AttachedWorld

from . import invariants
from .engines import OWNER, EngineProcess
from .links import SimFrontendLink
from .network import FrontendPort
from .tickets import SimEvent, Ticket
from .timeline import Actor, Process
from .violation import Violation

if TYPE_CHECKING:
    from .composition import Simulation

OPEN_S = 1.5
CLOSE_S = 0.5
SAMPLING = {n: SamplingParams(n=n, max_tokens=8) for n in (1, 2, 3)}


def raise_if_ended(world: World | None) -> None:
    """As `core/plan.py` does while an attach waits for the engine: the watcher's lane is read, and may say that nobody will."""
    for event in () if world is None else world.events(0):
        if isinstance(event, Failed | Exited):
            raise EngineDeadError(event.cause())


class SimFrontend(Frontend):
    """The real one. It only says more about when things happen, and lets other threads in where they could come in."""

    def __init__(self, process: FrontendProcess, frontend_id: int, world: World, liveness: Liveness) -> None:
        super().__init__(process.link, frontend_id, world, liveness=liveness)
        self.process, self.sim = process, process.sim
        self._closed = SimEvent(process.sim)
        self.verdict_at: float | None = None
        self.was_swept = False
        self.first_cause: Outcome | None = None
        self._drain_until: float | None = None
        self._sweep, self.ledger.sweep = self.ledger.sweep, self._checked_sweep

    def post(self, error: TllmError) -> None:
        if self._verdict is None and self.ledger.closed is None:
            self.verdict_at = self.sim.timeline.now
            self.sim.trace("%s: verdict: %r", self.process.name, error)
            self.process.judge_verdict(error)
        super().post(error)

    def _take(self, message: DownMessage) -> None:
        if self.sim.chance(0.04):
            self.process.submit()  # another thread, between the lane and the ledger
        super()._take(message)
        self.link.lane.told_down += 1

    def _bury(self, error: TllmError) -> None:
        """The drain's bound holds although each resumption begins it anew."""
        now = self.sim.timeline.now
        if self.ledger.closed is None:
            if self._drain_until is None:
                self._drain_until = now + DRAIN_S
                self.process.receiver.wake(self._drain_until)
            elif now >= self._drain_until:
                self.link.wake()
        super()._bury(error)

    def _checked_sweep(self, error: TllmError) -> Effects:
        first = self.ledger.closed is None
        if first and not isinstance(error, ExecutorClosedError) and self.link._sessions.lost is None:
            at, port = self.verdict_at, self.process.port
            if at is not None and port.oldest_at <= at and not port.closed:
                raise Violation("I4", f"{self.process.name} was swept over frames that had arrived before the verdict")
        self.sim.trace("%s: swept: %r", self.process.name, error)
        effects = self._sweep(error)
        if not self.was_swept:
            self.was_swept, self.first_cause = True, self.ledger.closed
        elif self.ledger.closed is not self.first_cause:
            raise Violation("I4", f"{self.process.name} ended by {self.first_cause}, and now by {self.ledger.closed}")
        return effects


class FrontendProcess(Process):
    """Opens its session, then serves its callers until it crashes, leaves or is lost.

    `disturbed`: it was frozen for long, or its path failed, so that the engine may have given it up.
    """

    def __init__(self, sim: Simulation, engine: EngineProcess, *, owner: bool, peer: bytes | None = None) -> None:
        self.number = len(sim.frontends)
        super().__init__(sim.timeline, f"frontend {self.number}")
        self.sim, self.engine, self.owner = sim, engine, owner
        self.peer = peer or bytes([1]) + sim.dice.randbytes(15)
        self.port = FrontendPort(sim.network, "engine", self.peer)
        self.link = self._make_link(self.port, engine.port, OWNER if owner else b"")
        self.link.around_send = self._let_others_in
        self.watch_port: FrontendPort | None = None
        self.watch_link_opened_at: float | None = None
        if not owner:
            self.watch_port = FrontendPort(sim.network, "watcher", self.peer)
            self.watch_link = self._make_link(self.watch_port, engine.watcher.port, b"")
        self.frontend: SimFrontend | None = None
        self.open_tickets: list[Ticket] = []
        self.ended: list[Ticket] = []
        self.calls: list[Call] = []
        self.withdrawn: set[int] = set()
        self.failure: TllmError | None = None
        self.disturbed = False
        self.well_since = self.awake_since = self.timeline.now
        self.open_until = self.timeline.now + OPEN_S
        self.left = False
        self.reads = sim.dice.choice((0.02, 0.2, 0.6))
        self.world: World | None = engine.world if owner else None
        self.receiver = self.port.actor = Actor(self, self._attach, sim.touch)
        if self.watch_port is not None:
            self.watch_port.actor = self.receiver
        for port in self.ports:
            port.process = self
        self.receiver.wake(self.timeline.now)

    def _make_link(self, port: FrontendPort, engine_port: object, owner: bytes) -> SimFrontendLink:
        settings = self.sim.settings
        return SimFrontendLink(
            port,
            engine_port,
            self.peer,
            self.sim.lanes,
            self.sim.network.rng,
            owner=owner,
            by_reference=settings.by_reference,
            settings=settings.wire,
            liveness=settings.liveness,
        )

    # ----------------------------------------------------------------------------------------------- its threads

    def _attach(self) -> None:
        """An attached frontend has a second session, with the watcher."""
        try:
            if not self.owner and self.world is None:
                self.watch_link.open(self.open_until - self.timeline.now)
                self.watch_link_opened_at = self.timeline.now
                self.world = AttachedWorld(self.watch_link, self.watch_port, {})
            meanwhile = partial(raise_if_ended, self.world if not self.owner else None)
            welcome = self.link.open(self.open_until - self.timeline.now, meanwhile)
            if self.sim.settings.same_host:
                self.link.send(Introduce("host", self.number, 0))
        except Refused as error:
            raise Violation("I9", f"refused: {error}") from None
        except (TransportError, EngineDeadError) as error:
            self.failure = error
            self.sim.trace("%s could not attach: %r", self.name, error)
            self.crash()
            return
        self.well_since = self.timeline.now
        self.sim.trace("%s has session %x", self.name, welcome.session)
        self.frontend = SimFrontend(self, welcome.frontend_id, self.world, Liveness(self.sim.settings.liveness))
        self.receiver.turn = self._serve
        watcher = Actor(self, self.frontend._watch_loop, self.sim.touch)
        if self.owner:
            self.engine.world.actor = watcher
        else:
            self.watch_port.actor = watcher
        watcher.ends = True
        watcher.wake(self.timeline.now)
        self.receiver.wake(self.timeline.now)

    def _serve(self) -> None:
        self.receiver.ends = True
        self.frontend._closed.sleep_on()
        self.frontend._receive_loop()

    def _let_others_in(self, when: str) -> None:
        """A caller's thread may be preempted before and after it sends."""
        sim = self.sim
        if not sim.nested and sim.chance(0.08):
            sim.run_nested(sim.dice.uniform(0.0, 0.02))

    # ---------------------------------------------------------------------------------------------------- faults

    @property
    def ports(self) -> tuple[FrontendPort, ...]:
        return (self.port,) if self.watch_port is None else (self.port, self.watch_port)

    @property
    def is_well(self) -> bool:
        if not self.alive or self.frozen_at is not None or self.port.broken_at is not None:
            return False
        return self.watch_port is None or self.watch_port.broken_at is None

    def freeze(self) -> None:
        super().freeze()
        self.disturbed = True

    def thaw(self) -> None:
        super().thaw()
        self.well_since = self.awake_since = self.timeline.now

    def crash(self) -> None:
        if not self.alive:
            return
        super().crash()
        self.port.close()
        if self.watch_port is not None:
            self.watch_port.close()
        self.sim.notice_end(self)
        if self.owner:
            self.sim.lose_owner(self.engine)

    def break_path(self, how: Callable[[FrontendPort], None]) -> None:
        self.disturbed = True
        for port in self.ports:
            how(port)

    def mend_path(self) -> None:
        for port in self.ports:
            port.mend()
        self.well_since = self.timeline.now

    # --------------------------------------------------------------------------------------------------- callers

    @property
    def serves(self) -> bool:
        return self.runs and self.frontend is not None and not self.left

    def submit(self, kind: int = 0, rest: int | None = None) -> Ticket | None:
        """One caller's `submit`; None where it was refused, and then nothing of it may remain."""
        frontend, sim = self.frontend, self.sim
        number = sim.next_number()
        n = sim.dice.choice((1, 1, 1, 2, 3))
        timeout_s = sim.dice.uniform(0.005, 0.2) if sim.chance(0.1) else None
        ticket = Ticket(number, n, sim.dice.randrange(1, 9), timeout_s, self.timeline.now)
        rest = sim.dice.choice((0, 0, 0, 20, 200)) if rest is None else rest
        prompt = TokenIds.of((number, kind, ticket.length, rest, *range(number, number + rest)))
        request = GenerationRequest(prompt_token_ids=prompt, sampling=SAMPLING[n], timeout_s=timeout_s)
        closed, sent, before = frontend.ledger.closed, self.port.sent, len(frontend.ledger)
        sim.trace("%s: submit %d kind %d n %d length %d", self.name, number, kind, n, ticket.length)
        try:
            ticket.box = frontend.submit(request)
        except (Overloaded, EngineDeadError, TransportError, ExecutorClosedError) as error:
            sim.trace("%s: %d is not taken: %r", self.name, number, error)
            self.withdrawn.add(number)
            self._check_refusal(error, closed, sent, before)
            return None
        if closed is not None:
            raise Violation("I4", f"request {number} was accepted by a ledger that was swept before")
        ticket.result = GenerationResult(request, ticket.box, self)
        self.open_tickets.append(ticket)
        return ticket

    def _check_refusal(self, error: TllmError, closed: Outcome | None, sent: int, before: int) -> None:
        now_closed = self.frontend.ledger.closed
        if closed is not None and (type(error) is not type(closed.error) or str(error) != str(closed.error)):
            raise Violation("I4", f"the first error was {closed.error!r}, and a later submit raised {error!r}")
        if closed is not None and self.port.sent != sent:
            raise Violation("I4", "a submit to a dead generation touched the transport")
        if isinstance(error, EngineDeadError) and now_closed is None:
            raise Violation("I5", f"a submit raised {error!r}, and the engine is not known dead")

    def abort(self, ticket: Ticket) -> None:
        ticket.abort_asked = True
        self.sim.trace("%s: abort %d", self.name, ticket.number)
        self.frontend.abort(ticket.box.client_id)
        if ticket.box.outcome is None:
            raise Violation("I1", f"request {ticket.number} was aborted and has no outcome")

    def drop(self, client_id: int) -> None:
        """As the executor's: a result lost its last reference."""
        self.frontend.ledger.dropped.append(client_id)

    def lose_consumer(self, ticket: Ticket) -> None:
        ticket.abort_asked = True
        ticket.lost_at = ticket.lost_at or self.timeline.now
        ticket.result = None

    def call(self, method: str) -> None:
        closed = self.frontend.ledger.closed
        try:
            self.calls.append(self.frontend.call(method, (self.sim.next_number(),), None))
        except (Overloaded, EngineDeadError, TransportError, ExecutorClosedError):
            return
        if closed is not None:
            raise Violation("I4", "a control call was accepted by a ledger that was swept before")

    def close(self) -> None:
        """The executor's shutdown: a world that is its own ends, any other only hears goodbye."""
        if self.frontend is None or self.left:
            return
        self.left = True
        self.sim.trace("%s: closes", self.name)
        if self.owner:
            self.engine.break_down()
        closer = Actor(self, lambda: self.frontend.close(CLOSE_S), self.sim.touch)
        closer.ends = True
        if self.owner:
            self.engine.world.closer = closer
        closer.wake(self.timeline.now)

    def judge_verdict(self, error: TllmError) -> None:
        invariants.judge_verdict(self, error)
