"""The promises of DESIGN section 2, each as a small function that is called after every step or at the end."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from tllm_core.contracts.messages import FINISH_REASONS
from tllm_core.errors import (
    BrokerLost,
    EngineDeadError,
    ExecutorClosedError,
    RequestError,
    TllmError,
    TransportError,
)
from tllm_core.ledger.ledger import Outcome
from tllm_core.wire.liveness import LivenessSettings

from .engines import EngineProcess
from .frontends import FrontendProcess
from .network import SlowProbe
from .tickets import Ticket
from .timeline import NEVER, Process
from .violation import Violation
from .watching import WatcherProcess

if TYPE_CHECKING:
    from .composition import Simulation

SLACK_S = 0.35
"""Beats and ticks come every 0.1 s, and frames take their time."""
BURIED_S = 0.25
"""A verdict that was posted is carried out within this: 50 ms of draining, or a tick of a lane that is lost."""
ORPHANED_S = 0.25
OWN_HOST_S = 0.1
PATIENT = frozenset({"submit", "control"})
FINISHED = frozenset(reason for reason in FINISH_REASONS if reason in ("length", "stop"))


# ------------------------------------------------------------------------------------------------ after every step


def one_outcome(sim: Simulation, process: FrontendProcess) -> None:
    """I1: no outcome is replaced. I3: nothing is added after it. I5, I11: it is a true one."""
    has_ended = False
    for ticket in process.open_tickets:
        outcome = ticket.box.outcome
        if outcome is None:
            if ticket.lost_at is not None and process.runs:
                waited = sim.timeline.now - max(ticket.lost_at, process.well_since)
                if waited > ORPHANED_S:
                    raise Violation("I8", f"request {ticket.number} lives on {waited:.2f} s after its consumer")
        else:
            ticket.outcome, ticket.rows_left = outcome, len(ticket.box.rows)
            true_outcome(sim, process, ticket, outcome)
            process.ended.append(ticket)
            has_ended = True
    if has_ended:
        process.open_tickets[:] = [ticket for ticket in process.open_tickets if ticket.outcome is None]
    for ticket in process.ended:
        if ticket.box.outcome is not ticket.outcome:
            raise Violation("I1", f"request {ticket.number} had {ticket.outcome} and now has {ticket.box.outcome}")
        rows = len(ticket.box.rows)
        if rows > ticket.rows_left:
            raise Violation("I3", f"request {ticket.number} got {rows - ticket.rows_left} rows after its outcome")
        ticket.rows_left = rows


def true_outcome(sim: Simulation, process: FrontendProcess, ticket: Ticket, outcome: Outcome) -> None:
    """What a request ended with did happen."""
    sim.trace("%s: %d ended: %s %r", process.name, ticket.number, outcome.reason, outcome.error)
    reason, error = outcome.reason, outcome.error
    model = process.engine.model
    if error is None:
        if reason == "abort" and not ticket.abort_asked:
            raise Violation("I5", f"request {ticket.number} was aborted by nobody")
        waited = sim.timeline.now - ticket.submitted_at
        if reason == "timeout" and (ticket.timeout_s is None or waited < ticket.timeout_s - 1e-6):
            raise Violation("I1", f"request {ticket.number} timed out after {waited:.3f} of {ticket.timeout_s} s")
    elif isinstance(error, RequestError):
        if ticket.number not in model.failed:
            raise Violation("I5", f"request {ticket.number} failed and the engine had no complaint: {error}")
    elif isinstance(error, ExecutorClosedError):
        if not process.left:
            raise Violation("I1", f"request {ticket.number}: {error!r}, and nobody closed the executor")
    elif process.frontend.ledger.closed is not outcome:
        raise Violation("I5", f"request {ticket.number} alone ended with {error!r}")


def dead_means_empty(sim: Simulation, process: FrontendProcess) -> None:
    """I4: nothing is pending once the generation is known dead, and a verdict is carried out at once."""
    frontend = process.frontend
    closed = frontend.ledger.closed
    if frontend.was_swept and closed is None:
        raise Violation("I4", f"{process.name} was swept and takes requests again")
    if closed is not None:
        if len(frontend.ledger):
            raise Violation("I4", f"{process.name} was swept and has {len(frontend.ledger)} pending")
    elif frontend.verdict_at is not None and process.runs:
        since = max(frontend.verdict_at, process.well_since)
        if sim.timeline.now - since > BURIED_S:
            raise Violation("I4", f"{process.name} has had its verdict for {sim.timeline.now - since:.2f} s")


def noticed_in_time(sim: Simulation, process: FrontendProcess) -> None:
    """I12: a death or freeze is known within its bound, by whoever was awake and had a path all the time."""
    engine = process.engine
    broken_since = engine_broken_since(engine)
    if broken_since is None:
        return
    bound = sim.settings.liveness.dead_after_s + SLACK_S
    since = max(broken_since, process.well_since)
    if process.owner and not engine.alive and engine.watcher.frozen_at is None and engine.exited_at is not None:
        bound, since = OWN_HOST_S, max(engine.exited_at, process.well_since)
    elif process.watch_link_opened_at is None and not process.owner:
        return
    elif not process.owner:
        watcher = engine.watcher.port
        if watcher.broken_at is not None:
            return
        since = max(since, process.watch_link_opened_at, watcher.whole_since) + sim.settings.liveness.reconnect_grace_s
    due_at = since + bound
    for port in process.ports:
        if port.slow_probe is not None:
            due_at = max(due_at, noticed_by_slow_probes(port.slow_probe, since, bound, sim.settings.liveness))
    if sim.timeline.now > due_at:
        raise Violation("I12", f"{process.name} has not noticed for {sim.timeline.now - since:.2f} s")


def noticed_by_slow_probes(probe: SlowProbe, since: float, bound: float, liveness: LivenessSettings) -> float:
    """By when: as after an outage, but no later than a path without any sign of life is given up."""
    return min(
        max(since, probe.until) + liveness.reconnect_grace_s + bound, since + liveness.broker_down_after_s + bound
    )


def outage_told_in_time(sim: Simulation, process: FrontendProcess) -> None:
    """I1, I11: who has no path for long is told so, and waits no more."""
    if process.runs:
        down_s = max(port.down_s(process.awake_since) for port in process.ports if port.broken_at is not None)
        if down_s > sim.settings.liveness.broker_down_after_s + SLACK_S:
            raise Violation("I11", f"{process.name} has had no path for {down_s:.2f} s, and nobody was told")


def engine_broken_since(engine: EngineProcess) -> float | None:
    """Since when it is dead, or frozen and still so; None while it is well or ends in an orderly way."""
    watcher = engine.watcher
    if not engine.alive or not watcher.alive:
        return None if engine.clean else engine.broken_since
    if engine.leaving:
        return None
    frozen_at = NEVER
    for part in (engine, watcher, *engine.ranks):
        if not part.alive:
            return engine.broken_since
        if part.frozen_at is not None and part.frozen_at < frozen_at:
            frozen_at = part.frozen_at
    return None if frozen_at == NEVER else frozen_at


def lane_is_bounded(sim: Simulation, process: FrontendProcess) -> None:
    """I10: window and backlog."""
    session = process.link._session
    if session is None:
        return
    sender = session.lane.sender
    if sender.sent > sender.acked + 1:
        window_is_bounded(process.name, sender)
    if sender.sent < sender.last and process.link.lane is not None:
        lane = process.link.lane
        waiting = lane.up[bisect_right(lane.up_ends, sender.sent) :]
        backlog_is_bounded(sim, process.name, sum(name in PATIENT for name, _ in waiting))


def lanes_are_bounded(sim: Simulation, process: EngineProcess | WatcherProcess) -> None:
    """I10: windows, backlogs, parked rows and half-open attaches."""
    sessions, settings = process.link._sessions, sim.settings
    for number, attached in sessions.table.items():
        sender = attached.session.lane.sender
        if sender.sent > sender.acked + 1:
            window_is_bounded(process.name, sender)
        if sender.sent < sender.last:
            lane = sim.lanes[number]
            waiting = lane.down[bisect_right(lane.down_ends, sender.sent) :]
            backlog_is_bounded(sim, process.name, sum(not urgent for *_, urgent in waiting))
    if len(sessions._table.half_open) > settings.wire.max_half_open:
        raise Violation("I10", f"{len(sessions._table.half_open)} attaches are half-open")
    if len(sessions._table._tombstones) > settings.wire.tombstones:
        raise Violation("I10", f"{len(sessions._table._tombstones)} tombstones")
    if isinstance(process, EngineProcess):
        if process.port.broken_at is not None:
            sessions_end_without_a_path(sim, process)
        for outbox in process.worker._outboxes.values():
            if outbox.parked_bytes > settings.worker.parked_bytes + sim.PARKED_SLACK:
                raise Violation("I10", f"{outbox.parked_bytes} bytes are parked")


def sessions_end_without_a_path(sim: Simulation, engine: EngineProcess) -> None:
    """I8: an engine that has had no path for long holds nothing for frontends any more."""
    down_s = engine.port.down_s(max(engine.awake_since, engine.stuck_until))
    if down_s > sim.settings.liveness.broker_down_after_s + SLACK_S and engine.link._sessions.table and engine.runs:
        raise Violation("I8", f"{engine.name} has had no path for {down_s:.2f} s and keeps its sessions")


def window_is_bounded(name: str, sender: object) -> None:
    """A single frame may be larger than the window."""
    wire, count = sender.settings, sender.sent - sender.acked
    if count > wire.window_frames:
        raise Violation("I10", f"{name} has {count} frames in flight of {wire.window_frames}")
    flight = sum(sender._frames[at].size for at in range(sender.acked + 1, sender.sent + 1))
    if flight > wire.window_bytes:
        raise Violation("I10", f"{name} has {flight} bytes in flight of {wire.window_bytes}")


def backlog_is_bounded(sim: Simulation, name: str, waiting: int) -> None:
    """What ends things is always taken, and not counted here."""
    if waiting > sim.settings.wire.backlog_frames:
        raise Violation("I10", f"{name} has a backlog of {waiting} of {sim.settings.wire.backlog_frames}")


def check(sim: Simulation, process: Process) -> None:
    """All that has to hold after a step in which the process took part."""
    if not process.alive:
        return
    if not isinstance(process, FrontendProcess):
        lanes_are_bounded(sim, process)
    elif process.frontend is not None:
        dead_means_empty(sim, process)
        one_outcome(sim, process)
        if process.frontend.verdict_at is None and not process.left:
            if process.is_well:
                noticed_in_time(sim, process)
            else:
                outage_told_in_time(sim, process)
        lane_is_bounded(sim, process)


# -------------------------------------------------------------------------------------------------- when asked for


def read(sim: Simulation, process: FrontendProcess, ticket: Ticket) -> None:
    """I2: what a consumer has read is a prefix of what the engine produced for that very sequence, and all of it at a finish."""
    result, model = ticket.result, process.engine.model
    if result is None:
        return
    result.finished  # noqa: B018 - reading is what the property does
    for output in result.outputs:
        produced = model.produced.get((ticket.number, output.index), [])
        tokens, start = output.token_ids, ticket.checked[output.index]
        if tokens[start:] != produced[start : len(tokens)]:
            raise Violation("I2", f"request {ticket.number}/{output.index} got {tokens} of {produced}")
        ticket.checked[output.index] = len(tokens)
        if output.finish_reason in FINISHED and len(tokens) != ticket.length:
            raise Violation(
                "I2", f"request {ticket.number}/{output.index} finished with {len(tokens)} of {ticket.length}"
            )


def seems_dead(process: FrontendProcess) -> bool:
    """The watcher alone had no path for long: from here that can't be told from a death, and I11 does not cover it."""
    own, other = process.watch_port, process.engine.watcher.port
    if own is None:
        return False
    now, dead_after_s = process.sim.timeline.now, process.sim.settings.liveness.dead_after_s
    for begin, end in [*other.outages, (other.broken_at, now)]:
        if begin is not None:
            both = sum(
                max(0.0, min(end, until) - max(begin, at)) for at, until in [*own.outages, (own.broken_at or now, now)]
            )
            if end - begin - both > dead_after_s - SLACK_S:
                return True
    return False


def judge_verdict(process: FrontendProcess, error: TllmError) -> None:
    """I11: an outage of the own path, or a pause of this side, is no death. I5, I10: nobody is given up for others' faults."""
    engine, sim = process.engine, process.sim
    if process.left:
        return  # everything of it has its outcome already
    if isinstance(error, EngineDeadError):
        if engine.broken_since is None and not seems_dead(process):
            raise Violation("I11", f"{process.name} declares a living engine dead: {error}")
        if error.root_cause.rank is not None and error.root_cause.rank not in engine.broken_ranks:
            raise Violation("I4", f"{process.name} blames a rank that is well: {error}")
    elif isinstance(error, BrokerLost):
        down_s = max(port.down_s(0.0) for port in process.ports)
        if engine.broken_since is not None and any(port.slow_probe is not None for port in process.ports):
            return  # nothing came, and nothing proves that it could have
        down_s += max(
            (2 * port.slow_probe.each_s for port in process.ports if port.slow_probe is not None), default=0.0
        )
        if down_s < sim.settings.liveness.broker_down_after_s - sim.network.weather.proof_s:
            raise Violation("I11", f"{process.name} had no path for {down_s:.2f} s and says: {error}")
    elif "receive thread failed" in str(error):
        raise Violation("I3", str(error))
    elif isinstance(error, TransportError) and not process.disturbed and not engine.disturbed and not sim.may_expel:
        raise Violation("I10", f"{process.name} did nothing wrong and hears: {error}")


# ------------------------------------------------------------------------------------------------------ at the end


def all_mended(sim: Simulation) -> None:
    """Nothing is frozen or cut any more."""
    for process in sim.frontends:
        if process.alive and not process.is_well:
            raise Violation("I1", f"the schedule is wrong: {process.name} is still frozen or without a path")
    for engine in sim.engines:
        for process in (engine, engine.watcher):
            if process.alive and (process.frozen_at is not None or process.port.broken_at is not None):
                raise Violation("I1", f"the schedule is wrong: {process.name} is still frozen or without a path")
        if engine.alive and (
            sim.timeline.now < engine.stuck_until or any(rank.frozen_at is not None for rank in engine.ranks)
        ):
            raise Violation("I1", f"the schedule is wrong: {engine.name} still hangs, or a rank of it does")


def all_attached(sim: Simulation) -> None:
    """I1: an attach is answered, or fails."""
    for process in sim.frontends:
        if process.alive and process.frontend is None and process.failure is None:
            raise Violation("I1", f"{process.name} is still attaching")


def all_ended(sim: Simulation) -> None:
    """I1: once everything is mended every request and call has its outcome."""
    for process in sim.frontends:
        if process.alive and process.frontend is not None:
            pending = [ticket.number for ticket in process.open_tickets]
            calls = [call.call_id for call in process.calls if call.outcome is None]
            if pending or calls:
                raise Violation("I1", f"{process.name} still waits for requests {pending} and calls {calls}")


def tables_are_empty(sim: Simulation) -> None:
    """I8: nothing remains of requests that have ended."""
    for process in sim.frontends:
        if process.alive and process.frontend is not None and len(process.frontend.ledger):
            raise Violation("I8", f"{process.name}'s ledger holds {len(process.frontend.ledger)} entries")
    for engine in sim.engines:
        if engine.alive:
            worker = engine.worker
            left = {
                "requests": len(worker._entries),
                "of sessions": sum(len(outbox.requests) for outbox in worker._outboxes.values()),
                "in the engine": len(engine.model.live),
                "parked": sum(outbox.parked_bytes for outbox in worker._outboxes.values()),
                "deadlines": 0 if worker._deadlines.next_at() is None else 1,
            }
            if any(left.values()):
                raise Violation("I8", f"{engine.name} still has {left}")


def lanes_are_idle(sim: Simulation) -> None:
    """I8: windows and backlogs are empty."""
    for process in sim.frontends:
        session = process.link._session
        if process.serves and process.frontend.ledger.closed is None and session is not None:
            sender_is_empty(process.name, session.lane.sender)
    for engine in sim.engines:
        if engine.alive:
            for attached in engine.link._sessions.table.values():
                sender_is_empty(engine.name, attached.session.lane.sender)


def sender_is_empty(name: str, sender: object) -> None:
    if not sender.is_idle or sender._frames or sender._flight_bytes or sender._backlog_bytes:
        raise Violation(
            "I8",
            f"{name}'s lane holds {len(sender._frames)} frames, {sender._flight_bytes} bytes in flight "
            f"and a backlog of {sender._backlog_bytes}",
        )


def sessions_are_gone_but_the_owners(sim: Simulation) -> None:
    """I8: no session outlives its frontend."""
    for engine in sim.engines:
        if engine.alive:
            sessions = engine.link._sessions
            owners = sum(process.owner and process.serves and process.engine is engine for process in sim.frontends)
            table = (
                len(sessions.table),
                len(sessions._table._ids._used),
                len(engine.worker._outboxes),
                len(sessions._table.half_open),
            )
            if max(table[:3]) > owners or table[3]:
                raise Violation("I8", f"{engine.name} still has sessions, ids, outboxes, half-open: {table}")


def worlds_are_gone(sim: Simulation) -> None:
    """I8: an engine ends with its owner."""
    for process in sim.frontends:
        if process.alive and process.owner and process.left and process.engine.alive:
            raise Violation("I8", f"{process.engine.name} outlives its owner")


def never_reached_the_engine(sim: Simulation) -> None:
    """I1: what submit refused was never sent. I6: each request reached the engine once (the model sees to it)."""
    for process in sim.frontends:
        both = process.withdrawn & process.engine.model.seen
        if both:
            raise Violation("I1", f"{process.name}: requests {sorted(both)} were refused and reached the engine")
