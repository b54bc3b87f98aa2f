"""The ledger by itself: rows to mailboxes, one outcome each, nothing after it, nothing left."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tllm_core.contracts.messages import (
    FINISH_CODES,
    ControlReply,
    ErrorReport,
    Logprob,
    RowExtra,
    StepBatch,
)
from tllm_core.errors import Cause, ControlError, EngineDeadError, ExecutorClosedError, RequestError
from tllm_core.ledger.ids import COUNTER_MASK, ClientIds, frontend_of
from tllm_core.ledger.ledger import ABORTED, Finish, Ledger, Mailbox, Tokens

STOP = FINISH_CODES["stop"]


def tokens_of(box: Mailbox, index: int = 0) -> list[int]:
    tokens: list[int] = []
    for item in box.rows:
        if isinstance(item, int):
            tokens += [item] if index == 0 else []
        elif isinstance(item, Tokens) and item.index == index:
            tokens += item.token_ids
    return tokens


def test_plain_rows_reach_their_own_mailbox_in_order() -> None:
    ledger = Ledger()
    a, b = ledger.register(1), ledger.register(2)
    ledger.deliver(StepBatch([1, 2], [10, 20]))
    ledger.deliver(StepBatch([2, 1], [21, 11], finishes=[(1, STOP, 7)]))
    assert (tokens_of(a), tokens_of(b)) == ([10, 11], [20, 21])
    assert a.rows[-1] == Finish(0, "stop", 7)
    assert a.outcome is not None
    assert a.outcome.reason == "stop"
    assert b.outcome is None


def test_rows_after_the_outcome_or_of_unknown_ids_are_counted_and_dropped() -> None:
    ledger = Ledger()
    box = ledger.register(1)
    ledger.deliver(StepBatch([1], [10], finishes=[(0, STOP, None)]))
    before = list(box.rows)
    ledger.deliver(StepBatch([1, 99], [11, 5], finishes=[(0, STOP, None)]))
    assert list(box.rows) == before
    assert ledger.counters["late_rows"] == 3
    assert len(ledger) == 0


def test_a_request_of_n_sequences_ends_with_its_last_one() -> None:
    ledger = Ledger()
    box = ledger.register(1, n=2)
    ledger.deliver(StepBatch([1, 1], [10, 20, 21], counts=[1, 2], indexes=[0, 1], finishes=[(0, STOP, None)]))
    assert box.outcome is None
    ledger.deliver(StepBatch([1, 1], [99, 22], indexes=[0, 1], finishes=[(1, STOP, None)]))
    assert (tokens_of(box, 0), tokens_of(box, 1)) == ([10], [20, 21, 22])
    assert box.outcome is not None


def test_an_error_row_ends_its_own_request_only() -> None:
    ledger = Ledger()
    a, b = ledger.register(1), ledger.register(2)
    extra = RowExtra(error=ErrorReport("logits are NaN", "temperature"))
    ledger.deliver(StepBatch([1, 2], [20], counts=[0, 1], extras=[(0, extra)]))
    assert a.outcome is not None
    error = a.outcome.fresh_error()
    assert isinstance(error, RequestError)
    assert (str(error), error.field, error.client_id) == ("logits are NaN", "temperature", 1)
    assert b.outcome is None
    assert tokens_of(b) == [20]


def test_unread_extras_beyond_the_bound_end_that_request_and_abort_it() -> None:
    ledger = Ledger(mailbox_bytes=2_000)
    box, other = ledger.register(1), ledger.register(2)
    extra = RowExtra(logprobs=[[Logprob(i, -1.0, i + 1) for i in range(20)]])
    for _ in range(3):
        effects = ledger.deliver(StepBatch([1, 2], [5, 6], extras=[(0, extra)]))
        if box.outcome is not None:
            break
    assert box.outcome is not None
    assert box.outcome.reason == "error"
    assert effects.aborts == [1]
    assert other.outcome is None


def test_settle_is_once_and_quiet_after() -> None:
    ledger = Ledger()
    box = ledger.register(1)
    assert ledger.settle(1, ABORTED) is not None
    assert ledger.settle(1, ABORTED) is None
    assert ledger.settle(77, ABORTED) is None
    assert box.rows[-1] == Finish(0, "abort", None)


def test_a_sweep_ends_everything_and_stays_with_its_first_error() -> None:
    ledger = Ledger()
    box, call = ledger.register(1), ledger.register_call(5)
    ledger.sweep(EngineDeadError(Cause("rank 0 was killed by SIGKILL", rank=0, exitcode=-9)))
    ledger.sweep(ExecutorClosedError("the executor was shut down"))
    for outcome in (box.outcome, call.outcome):
        assert outcome is not None
        assert isinstance(outcome.error, EngineDeadError)
    with pytest.raises(EngineDeadError) as caught:
        ledger.register(2)
    assert caught.value.root_cause.exitcode == -9
    with pytest.raises(EngineDeadError):
        ledger.register_call(6)
    assert len(ledger) == 0


def test_every_waiter_gets_an_error_of_its_own() -> None:
    ledger = Ledger()
    box = ledger.register(1)
    ledger.sweep(EngineDeadError("gone"))
    assert box.outcome is not None
    first, second = box.outcome.fresh_error(), box.outcome.fresh_error()
    assert first is not second
    assert isinstance(first, EngineDeadError)
    assert first.root_cause.message == "gone"


def test_a_withdrawn_registration_leaves_nothing() -> None:
    ledger = Ledger()
    ledger.register(1)
    assert ledger.withdraw(1)
    assert not ledger.withdraw(1)
    assert len(ledger) == 0


def test_control_replies_reach_their_call_and_late_ones_are_counted() -> None:
    ledger = Ledger()
    ok, bad = ledger.register_call(1), ledger.register_call(2)
    ledger.reply(ControlReply(1, [42]))
    ledger.reply(ControlReply(2, error="no such method"))
    ledger.reply(ControlReply(1, [43]))
    assert list(ok.values) == [42]
    assert bad.outcome is not None
    assert isinstance(bad.outcome.error, ControlError)
    assert ledger.counters["late_replies"] == 1


def test_client_ids_carry_their_frontend_and_wrap_inside_their_field() -> None:
    ids = ClientIds(7, first=COUNTER_MASK)
    last, wrapped = ids.draw(), ids.draw()
    assert frontend_of(last) == frontend_of(wrapped) == 7
    assert wrapped == 7 << 48
    assert ClientIds(32_766).draw() < 2**63
    with pytest.raises(ValueError, match="frontend id"):
        ClientIds(32_767)


class LedgerMachine(RuleBasedStateMachine):
    """Against a model: delivered is exactly what was produced before the one outcome."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.next_id = 1
        self.produced: dict[tuple[int, int], list[int]] = {}
        self.boxes: dict[int, Mailbox] = {}
        self.open: dict[int, set[int]] = {}
        self.outcomes: dict[int, str] = {}
        self.dead = False

    @rule(target=requests, n=st.integers(1, 3))
    def register(self, n: int) -> int:
        client_id, self.next_id = self.next_id, self.next_id + 1
        if self.dead:
            with pytest.raises(EngineDeadError):
                self.ledger.register(client_id, n)
            return client_id
        self.boxes[client_id] = self.ledger.register(client_id, n)
        self.open[client_id] = set(range(n))
        self.produced.update({(client_id, index): [] for index in range(n)})
        return client_id

    @rule(rows=st.lists(st.tuples(requests, st.integers(0, 2), st.lists(st.integers(0, 9), max_size=3)), max_size=6))
    def deliver(self, rows: list[tuple[int, int, list[int]]]) -> None:
        rows = list({(client_id, index): (client_id, index, ids) for client_id, index, ids in rows}.values())
        flat = [token for _, _, ids in rows for token in ids]
        self.ledger.deliver(
            StepBatch([r[0] for r in rows], flat, counts=[len(r[2]) for r in rows], indexes=[r[1] for r in rows])
        )
        for client_id, index, ids in rows:
            if index in self.open.get(client_id, ()):
                self.produced[client_id, index] += ids

    @rule(client_id=requests, token=st.integers(0, 9))
    def deliver_plain(self, client_id: int, token: int) -> None:
        self.ledger.deliver(StepBatch([client_id], [token]))
        if 0 in self.open.get(client_id, ()):
            self.produced[client_id, 0].append(token)

    @rule(client_id=requests, index=st.integers(0, 2))
    def finish(self, client_id: int, index: int) -> None:
        self.ledger.deliver(StepBatch([client_id], [], counts=[0], indexes=[index], finishes=[(0, STOP, None)]))
        if index in self.open.get(client_id, ()):
            self.open[client_id].discard(index)
            if not self.open[client_id]:
                self.outcomes[client_id] = "stop"

    @rule(client_id=requests)
    def abort(self, client_id: int) -> None:
        was_open = bool(self.open.get(client_id))
        assert (self.ledger.settle(client_id, ABORTED) is not None) == was_open
        if was_open:
            self.open[client_id].clear()
            self.outcomes[client_id] = "abort"

    @rule(client_id=consumes(requests))
    def error(self, client_id: int) -> None:
        extra = RowExtra(error=ErrorReport("bad"))
        index = min(self.open.get(client_id) or {0})
        self.ledger.deliver(StepBatch([client_id], [], counts=[0], indexes=[index], extras=[(0, extra)]))
        if self.open.get(client_id):
            self.open[client_id].clear()
            self.outcomes[client_id] = "error"

    @rule()
    def die(self) -> None:
        self.ledger.sweep(EngineDeadError("dead"))
        self.dead = True
        for client_id, indexes in self.open.items():
            if indexes:
                indexes.clear()
                self.outcomes[client_id] = "EngineDeadError"

    @invariant()
    def delivered_is_what_was_produced(self) -> None:
        for (client_id, index), tokens in self.produced.items():
            assert tokens_of(self.boxes[client_id], index) == tokens

    @invariant()
    def one_outcome_each(self) -> None:
        for client_id, box in self.boxes.items():
            reason = None if box.outcome is None else box.outcome.reason
            assert reason == self.outcomes.get(client_id)

    @invariant()
    def the_table_holds_the_open_ones_only(self) -> None:
        assert set(self.ledger.open_ids()) == {client_id for client_id, indexes in self.open.items() if indexes}


TestLedgerMachine = LedgerMachine.TestCase
