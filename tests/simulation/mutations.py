"""Known wrong variants of the product, each of which a pinned schedule must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from tllm_core.contracts.messages import Submit
from tllm_core.errors import EngineDeadError, RequestError
from tllm_core.frontend import Frontend
from tllm_core.ledger.ledger import ABORTED, Ledger, Mailbox, Outcome
from tllm_core.wire.chunks import Assembly
from tllm_core.wire.header import CUT, Gate, Seal
from tllm_core.wire.lane import Lane, Outgoing, Receiver, Sender
from tllm_core.wire.link import EngineLink
from tllm_core.wire.liveness import Liveness, Progress, Silence, Verdict
from tllm_core.wire.path import PathWatch
from tllm_core.wire.session import FrontendSession
from tllm_core.wire.sessions import EngineSessions
from tllm_core.world.outbox import Outbox
from tllm_core.world.pulse import Pulse
from tllm_core.world.rows import Parked, rows_of
from tllm_core.world.worker import Worker

from .composition import Simulation
from .settings import Profile

Patches = Iterator[Any]


class Mutation(Struct, frozen=True):
    """`invariant` is the one that catches it in schedule `seed` of `profile`; `patches` yields what is exchanged meanwhile."""

    invariant: str
    seed: int
    patches: Callable[[], Patches]
    profile: Profile = "short"

    @property
    def name(self) -> str:
        return self.patches.__name__


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    with ExitStack() as stack:
        for one in mutation.patches():
            stack.enter_context(one)
        yield


def preempt() -> None:
    """Other threads run here."""
    sim = Simulation.current
    if sim is not None and not sim.nested and sim.chance(0.3):
        sim.run_nested(0.03)


# ---------------------------------------------------------------------------------------------------------- ledger


def send_before_register() -> Patches:
    def submit(self: Frontend, request: Any) -> Mailbox:
        client_id = self._ids.draw()
        self.link.send(Submit(client_id, request))
        return self.ledger.register(client_id, request.sampling.n)

    yield patch.object(Frontend, "submit", submit)


def register_not_atomic_with_the_dead_flag() -> Patches:
    def register(self: Ledger, client_id: int, n: int = 1) -> Mailbox:
        self._refuse_if_closed()
        preempt()
        box = self._open[client_id] = Mailbox(client_id, n)
        return box

    yield patch.object(Ledger, "register", register)


def sweep_without_stickiness() -> Patches:
    sweep = Ledger.sweep

    def forgetful(self: Ledger, error: Any) -> Any:
        effects = sweep(self, error)
        self._closed = None
        return effects

    yield patch.object(Ledger, "sweep", forgetful)


def sweep_that_forgets_calls() -> Patches:
    sweep = Ledger.sweep

    def forgetful(self: Ledger, error: Any) -> Any:
        calls, self._calls = self._calls, {}
        effects = sweep(self, error)
        self._calls = calls
        return effects

    yield patch.object(Ledger, "sweep", forgetful)


def withdraw_that_forgets() -> Patches:
    yield patch.object(Ledger, "withdraw", lambda self, client_id: client_id in self._open)


def late_rows_delivered() -> Patches:
    settle, deliver = Ledger._settle, Ledger.deliver

    def keep(self: Ledger, box: Mailbox, outcome: Outcome, effects: Any) -> None:
        settle(self, box, outcome, effects)
        self.__dict__.setdefault("ghosts", {})[box.client_id] = box

    def to_ghosts(self: Ledger, batch: Any) -> Any:
        for row in rows_of(batch):
            ghost = self.__dict__.get("ghosts", {}).get(row.client_id)
            if ghost is not None:
                ghost.rows.extend(row.token_ids)
        return deliver(self, batch)

    yield patch.object(Ledger, "_settle", keep)
    yield patch.object(Ledger, "deliver", to_ghosts)


def first_cause_not_kept() -> Patches:
    sweep = Ledger.sweep

    def latest(self: Ledger, error: Any) -> Any:
        self._closed = None
        return sweep(self, error)

    yield patch.object(Ledger, "sweep", latest)


# -------------------------------------------------------------------------------------------------------- frontend


def sweep_before_draining() -> Patches:
    def bury(self: Frontend, error: Any) -> None:
        if self.ledger.closed is None:
            self._apply(self.ledger.sweep(error))

    yield patch.object(Frontend, "_bury", bury)


def abort_not_settled_locally() -> Patches:
    yield patch.object(Frontend, "abort", lambda self, client_id: self._tell_abort(client_id))


def death_told_as_a_request_error() -> Patches:
    post = Frontend.post

    def disguised(self: Frontend, error: Any) -> None:
        post(self, RequestError(str(error)) if isinstance(error, EngineDeadError) else error)

    yield patch.object(Frontend, "post", disguised)


def dropped_results_kept() -> Patches:
    yield patch.object(Ledger, "take_dropped", lambda self: [])


# ------------------------------------------------------------------------------------------------------------ lane


def ack_before_deliver() -> Patches:
    take = Receiver.take

    def hasty(self: Receiver, sequence: int, now: float) -> bool:
        taken = take(self, sequence, now)
        self.ack = self.taken
        return taken

    yield patch.object(Receiver, "take", hasty)


def abort_on_a_lane_of_its_own() -> Patches:
    offer = Sender.offer

    def overtaking(self: Sender, kind: int, payload: Any, size: int, urgent: bool = False) -> int:
        sequence = offer(self, kind, payload, size, urgent)
        if urgent:
            move_to_front(self)
        return sequence

    yield patch.object(Sender, "offer", overtaking)


def move_to_front(sender: Sender) -> None:
    """The newest frame goes before all that were not sent yet."""
    waiting = [sender._frames[at] for at in range(sender.sent + 1, sender.last + 1)]
    for sequence, frame in enumerate([*waiting[-1:], *waiting[:-1]], sender.sent + 1):
        sender._frames[sequence] = Outgoing(sequence, frame.kind, frame.payload, frame.size)


def backlog_that_forgets_order() -> Patches:
    offer = Sender.offer

    def stack(self: Sender, kind: int, payload: Any, size: int, urgent: bool = False) -> int:
        sequence = offer(self, kind, payload, size, urgent)
        move_to_front(self)
        return sequence

    yield patch.object(Sender, "offer", stack)


def duplicate_accepted() -> Patches:
    take = Receiver.take
    yield patch.object(
        Receiver, "take", lambda self, sequence, now: take(self, sequence, now) or sequence <= self.taken
    )


def gap_accepted() -> Patches:
    def take(self: Receiver, sequence: int, now: float) -> bool:
        if sequence <= self.taken:
            return False
        self.taken = sequence
        self._ack_at = now
        return True

    yield patch.object(Receiver, "take", take)


def window_unbounded() -> Patches:
    yield patch.object(Sender, "_has_window", lambda self: self.cursor <= self.last)


def backlog_unbounded() -> Patches:
    offer = Sender.offer
    yield patch.object(
        Sender, "offer", lambda self, kind, payload, size, urgent=False: offer(self, kind, payload, size, True)
    )


def nothing_resent_after_a_reconnect() -> Patches:
    yield patch.object(Lane, "path_changed", lambda self: None)


def acknowledged_frames_kept() -> Patches:
    advance = Sender._advance

    def hoard(self: Sender, ack: int, now: float) -> None:
        kept = dict(self._frames)
        advance(self, ack, now)
        self._frames = kept

    yield patch.object(Sender, "_advance", hoard)


# --------------------------------------------------------------------------------------------------------- session


def session_resumed_after_restart() -> Patches:
    start = Simulation.start_engine

    def resume(self: Simulation) -> Any:
        engine = start(self)
        if len(self.engines) > 1:
            before = self.engines[-2]
            old, new = before.link._sessions, engine.link._sessions
            new.terms.generation = old.terms.generation
            engine.port.address = before.port.address
            new._gate, new._in, new._out = old._gate, old._in, old._out
            new.table.update(old.table)
        return engine

    yield patch.object(Simulation, "start_engine", resume)


def generation_not_checked() -> Patches:
    objection = Gate._objection

    def lenient(self: Gate, header: Any, frame: Any) -> str | None:
        return objection(self, header._replace(generation=self._generation), frame)

    yield patch.object(Gate, "_objection", lenient)


def direction_not_checked() -> Patches:
    objection = Gate._objection

    def lenient(self: Gate, header: Any, frame: Any) -> str | None:
        return objection(self, header._replace(flags=header.flags & ~1 | self._direction), frame)

    yield patch.object(Gate, "_objection", lenient)


def mac_not_checked() -> Patches:
    yield patch.object(Seal, "is_genuine", lambda self, frame: True)


def beat_accepted_twice() -> Patches:
    take = FrontendSession._take_special

    def trusting(self: FrontendSession, header: Any, frame: Any) -> None:
        self._last_beat = 0
        take(self, header, frame)

    yield patch.object(FrontendSession, "_take_special", trusting)


def expelled_session_still_served() -> Patches:
    yield patch.object(EngineLink, "end", lambda self, session, reason: None)


def silent_frontends_kept() -> Patches:
    yield patch.object(EngineSessions, "_objection", lambda self, attached, now, path_ok_at: attached.session.broken)


def half_open_unbounded() -> Patches:
    attach = EngineSessions._attach

    def welcoming(self: EngineSessions, hello: Any, now: float) -> Any:
        half_open, self._table.half_open = self._table.half_open, {}
        attached = attach(self, hello, now)
        self._table.half_open = {**half_open, **self._table.half_open}
        return attached

    yield patch.object(EngineSessions, "_attach", welcoming)


# ---------------------------------------------------------------------------------------------------------- chunks


def chunk_dropped_by_reassembly() -> Patches:
    add = Assembly.add

    def lossy(self: Assembly, kind: int, flags: int, payload: Any) -> Any:
        pieces = self._pieces
        if flags & CUT and len(pieces) == 1:
            return None
        return add(self, kind, flags, payload)

    yield patch.object(Assembly, "add", lossy)


def reassembly_mixes_two_messages() -> Patches:
    """The first piece of a message is kept, and begins the next one as well."""
    add = Assembly.add

    def sticky(self: Assembly, kind: int, flags: int, payload: Any) -> Any:
        first = [*self._buffers, *self._pieces, payload[0]][0]
        whole = add(self, kind, flags, payload)
        if whole is not None and not self._pieces:
            self._kind, self._pieces = kind, [first]
        return whole

    yield patch.object(Assembly, "add", sticky)


def reassembly_survives_a_session() -> Patches:
    """Half of a message that a peer said in one session begins what it says in the next."""
    assemblies: dict[Any, Assembly] = {}
    attach = EngineSessions._attach

    def inherit(self: EngineSessions, hello: Any, now: float) -> Any:
        attached = attach(self, hello, now)
        if attached is not None:
            session = attached.session
            session._assembly = assemblies.setdefault((id(self), hello.peer), session._assembly)
        return attached

    yield patch.object(EngineSessions, "_attach", inherit)


# ------------------------------------------------------------------------------------------------------------ path


def gap_not_told_after_a_reconnect() -> Patches:
    yield patch.object(Receiver, "path_changed", lambda self: None)


def outage_taken_for_a_death() -> Patches:
    def verdict(self: Liveness, now: float, path_ok_at: float) -> Verdict | None:
        if now - path_ok_at <= self.settings.dead_after_s:
            return None
        return Verdict("silent", "the engine has not been heard of")

    yield patch.object(Liveness, "_path_verdict", verdict)


def outage_never_told() -> Patches:
    yield patch.object(PathWatch, "lost_for_s", lambda self, now, path_ok_at: None)


def late_proofs_hold_a_verdict_up() -> Patches:
    def verdict(self: Liveness, now: float, path_ok_at: float) -> Verdict | None:
        down_s = self._path.lost_for_s(now, path_ok_at)
        return None if down_s is None else Verdict("broker_down", "there has been no path")

    yield patch.object(Liveness, "_path_verdict", verdict)


def engine_keeps_sessions_without_a_path() -> Patches:
    tend = EngineSessions.tend

    def blind(self: EngineSessions, now: float, path_ok_at: float) -> Any:
        self._path = None
        return tend(self, now, path_ok_at)

    yield patch.object(EngineSessions, "tend", blind)


# -------------------------------------------------------------------------------------------------------- liveness


def deadline_judged_on_a_stale_path() -> Patches:
    is_over = Silence.is_over
    yield patch.object(Silence, "is_over", lambda self, now, path_ok_at: is_over(self, now, now))


def frozen_frontend_declares_death() -> Patches:
    def is_over(self: Silence, now: float, path_ok_at: float) -> bool:
        if self._since is None:
            self._since = now
        return min(now, path_ok_at) - self._since > self.after_s

    yield patch.object(Silence, "is_over", is_over)


def silence_never_over() -> Patches:
    yield patch.object(Silence, "is_over", lambda self, now, path_ok_at: False)


def stopped_ranks_ignored() -> Patches:
    yield patch.object(Liveness, "_stopped_for_long", lambda self: None)


def pause_taken_for_a_hang() -> Patches:
    yield patch.object(Worker, "_is_busy", lambda self: bool(self._entries))


def computation_taken_for_a_hang() -> Patches:
    is_made_by = Progress._is_made_by

    def blind(self: Progress, beat: Any, now: float) -> bool:
        return is_made_by(self, replace(beat, cpu_s=self._mark[1].cpu_s), now)

    yield patch.object(Progress, "_is_made_by", blind)


def hang_never_noticed() -> Patches:
    yield patch.object(Progress, "hang", lambda self, after_s: None)


def wrong_rank_blamed() -> Patches:
    stopped = Liveness._stopped_for_long

    def rank_0(self: Liveness) -> Verdict | None:
        verdict = stopped(self)
        return None if verdict is None else replace(verdict, rank=0)

    yield patch.object(Liveness, "_stopped_for_long", rank_0)


# ---------------------------------------------------------------------------------------------------------- worker


def parked_rows_replaced() -> Patches:
    def absorb(self: Parked, batch: Any) -> None:
        for row in rows_of(batch):
            self._rows[row.client_id, row.index] = row

    yield patch.object(Parked, "absorb", absorb)


def parked_rows_overtaken() -> Patches:
    flush = Outbox.flush

    def hasty(self: Outbox, now: float) -> Any:
        if self.rows.client_ids and self.stalled_since is not None:
            self._send(self.session, self.rows.take())
        return flush(self, now)

    yield patch.object(Outbox, "flush", hasty)


def aborted_requests_run_on() -> Patches:
    yield patch.object(Worker, "_abort", lambda self, outbox, client_id: None)


def outcome_replaced_by_the_sweep() -> Patches:
    sweep = Ledger.sweep

    def all_boxes(self: Ledger, error: Any) -> Any:
        effects = sweep(self, error)
        for box in self.__dict__.get("settled", ()):
            box.outcome = self._closed
        return effects

    settle = Ledger._settle

    def remember(self: Ledger, box: Mailbox, outcome: Outcome, effects: Any) -> None:
        settle(self, box, outcome, effects)
        if outcome is ABORTED:
            self.__dict__.setdefault("settled", []).append(box)

    yield patch.object(Ledger, "sweep", all_boxes)
    yield patch.object(Ledger, "_settle", remember)


# ----------------------------------------------------------------------------------------------------------- pulse


def lane_unread_in_a_long_step() -> Patches:
    yield patch.object(Pulse, "busy", lambda self: None)


def stash_overtaken_by_what_came_later() -> Patches:
    receive = Pulse.receive

    def latest_first(self: Pulse, timeout: float | None) -> Any:
        stashed = list(self._stash)
        self._stash.clear()
        return receive(self, 0 if stashed else timeout) + stashed

    yield patch.object(Pulse, "receive", latest_first)


def stash_forgotten() -> Patches:
    receive = Pulse.receive

    def forgetful(self: Pulse, timeout: float | None) -> Any:
        self._stash.clear()
        return receive(self, timeout)

    yield patch.object(Pulse, "receive", forgetful)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("I1", 27, send_before_register),
    Mutation("I4", 116, register_not_atomic_with_the_dead_flag),
    Mutation("I4", 0, sweep_without_stickiness),
    Mutation("I4", 465, sweep_that_forgets_calls),
    Mutation("I4", 0, first_cause_not_kept),
    Mutation("I4", 1418, sweep_before_draining),
    Mutation("I4", 0, ack_before_deliver),
    Mutation("I8", 10, withdraw_that_forgets),
    Mutation("I3", 34, late_rows_delivered),
    Mutation("I1", 8, outcome_replaced_by_the_sweep),
    Mutation("I1", 8, abort_not_settled_locally),
    Mutation("I5", 80, death_told_as_a_request_error),
    Mutation("I8", 15, dropped_results_kept, "long"),
    Mutation("I6", 64, abort_on_a_lane_of_its_own),
    Mutation("I6", 1, backlog_that_forgets_order),
    Mutation("I6", 22, duplicate_accepted),
    Mutation("I6", 26, gap_accepted),
    Mutation("I10", 4, window_unbounded),
    Mutation("I10", 22, backlog_unbounded),
    Mutation("I10", 59, half_open_unbounded),
    Mutation("I1", 160, nothing_resent_after_a_reconnect),
    Mutation("I8", 0, acknowledged_frames_kept),
    Mutation("I9", 546, session_resumed_after_restart),
    Mutation("I9", 73, generation_not_checked),
    Mutation("I9", 46, direction_not_checked),
    Mutation("I9", 536, mac_not_checked),
    Mutation("I9", 29, beat_accepted_twice, "long"),
    Mutation("I1", 302, expelled_session_still_served),
    Mutation("I8", 349, silent_frontends_kept),
    Mutation("I11", 234, deadline_judged_on_a_stale_path),
    Mutation("I11", 6909, frozen_frontend_declares_death),
    Mutation("I12", 48, silence_never_over),
    Mutation("I12", 35, stopped_ranks_ignored),
    Mutation("I2", 73, parked_rows_replaced),
    Mutation("I2", 127, parked_rows_overtaken),
    Mutation("I8", 8, aborted_requests_run_on),
    Mutation("I12", 10, lane_unread_in_a_long_step),
    Mutation("I6", 96, stash_overtaken_by_what_came_later),
    Mutation("I1", 10, stash_forgotten),
    Mutation("I2", 1, chunk_dropped_by_reassembly),
    Mutation("I4", 1, reassembly_mixes_two_messages),
    Mutation("I4", 9040, reassembly_survives_a_session),
    Mutation("I1", 1346, gap_not_told_after_a_reconnect),
    Mutation("I11", 234, outage_taken_for_a_death),
    Mutation("I11", 234, outage_never_told),
    Mutation("I12", 3031, late_proofs_hold_a_verdict_up),
    Mutation("I8", 1178, engine_keeps_sessions_without_a_path),
    Mutation("I12", 1506, pause_taken_for_a_hang),
    Mutation("I12", 95, computation_taken_for_a_hang),
    Mutation("I12", 1112, hang_never_noticed),
    Mutation("I4", 147, wrong_rank_blamed, "long"),
)
