"""Who waits for what: register, deliver, settle, sweep. Sans-IO; one lock decides every race between them.

A consumer never takes the ledger's lock: it drains its mailbox, and where that is empty it leaves a waiter and looks once
more. The other side appends rows first and takes waiters afterwards, one atomic pop at a time, so that one of the two always
sees the other.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from tllm_core.contracts.messages import (
    FINISH_CODES,
    FINISH_REASONS,
    ControlReply,
    FinishReason,
    Plain,
    RowExtra,
    StepBatch,
)
from tllm_core.errors import ControlError, RequestError, TllmError

Waiter: TypeAlias = Any
"""What a consumer leaves behind to be woken: an asyncio future or a held lock (`waiting.py`). Opaque here."""

ABORT = FINISH_CODES["abort"]


class Outcome(Struct, frozen=True, gc=False):
    """The one terminal outcome of a request or control call. `error` is raised, as a fresh copy, in every waiter."""

    reason: str
    error: TllmError | None = None

    def fresh_error(self) -> TllmError | None:
        """A copy, so that many consumers never share a growing traceback."""
        return None if self.error is None else copy.copy(self.error).with_traceback(None)


FINISHED = Outcome("finished")
ABORTED = Outcome("abort")


class Tokens(Struct, frozen=True, gc=False):
    """A mailbox item: tokens of one sequence, with what only some rows have."""

    index: int
    token_ids: Sequence[int]
    extra: RowExtra | None


class Finish(Struct, frozen=True, gc=False):
    """A mailbox item: one sequence ended."""

    index: int
    reason: FinishReason | None
    stop_reason: int | str | None


class Mailbox:
    """What has arrived for one request and was not read. Filled under the ledger's lock, read by one consumer at a time.

    rows: a bare int is one token of sequence 0 (the common case costs no object), else Tokens or Finish. `outcome` is set
    after the last row was appended: who reads it before draining misses nothing. waiters, final_waiters: woken by the next
    row, or by the outcome alone; consumers append, and the ledger pops.
    """

    __slots__ = ("client_id", "extra_in", "extra_out", "final_waiters", "open", "outcome", "rows", "waiters")

    def __init__(self, client_id: int, n: int) -> None:
        self.client_id = client_id
        self.rows: deque[int | Tokens | Finish] = deque()
        self.outcome: Outcome | None = None
        self.open: set[int] = set(range(n))
        self.waiters: list[Waiter] = []
        self.final_waiters: list[Waiter] = []
        self.extra_in = 0
        self.extra_out = 0


class Call:
    """A control call that waits for its reply."""

    __slots__ = ("call_id", "outcome", "values", "waiters")

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.values: Sequence[Plain] = ()
        self.outcome: Outcome | None = None
        self.waiters: list[Waiter] = []


class Effects(Struct, gc=False):
    """What the caller has to do after the lock is free: wake, and send aborts for requests that the ledger ended itself."""

    woken: list[Waiter]
    aborts: list[int]
    settled: list[tuple[int, str]]


class Ledger:
    """The table of open requests and control calls.

    mailbox_bytes: unread extras (logprobs and their like) that one request may pile up; beyond it that request alone ends.
    dropped: ids whose consumer was garbage collected; a finalizer may only append, `take_dropped` reads.
    """

    def __init__(self, mailbox_bytes: int = 64 << 20) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Mailbox] = {}
        self._calls: dict[int, Call] = {}
        self._closed: Outcome | None = None
        self._mailbox_bytes = mailbox_bytes
        self.dropped: deque[int] = deque()
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open) + len(self._calls)

    @property
    def in_flight(self) -> int:
        """Requests without an outcome."""
        return len(self._open)

    # ------------------------------------------------------------------------------------------------ register

    def register(self, client_id: int, n: int = 1) -> Mailbox:
        """Opens a mailbox for a request of `n` sequences, before anything is sent. Raises the sticky error once swept."""
        box = Mailbox(client_id, n)
        with self._lock:
            self._refuse_if_closed()
            if client_id in self._open:
                raise RequestError(f"client id {client_id} is in use", field="client_id")
            self._open[client_id] = box
        return box

    def register_call(self, call_id: int) -> Call:
        """As `register`, for a control call."""
        call = Call(call_id)
        with self._lock:
            self._refuse_if_closed()
            self._calls[call_id] = call
        return call

    def withdraw(self, client_id: int) -> bool:
        """Takes back a registration whose send failed; False where it got an outcome in the meantime."""
        with self._lock:
            return self._open.pop(client_id, None) is not None

    def withdraw_call(self, call_id: int) -> bool:
        """As `withdraw`; also for a caller whose deadline passed: a late reply is then counted and dropped."""
        with self._lock:
            return self._calls.pop(call_id, None) is not None

    def _refuse_if_closed(self) -> None:
        if self._closed is not None:
            error = self._closed.fresh_error()
            assert error is not None
            raise error

    # ------------------------------------------------------------------------------------------------- deliver

    def deliver(self, batch: StepBatch) -> Effects:
        """Puts a step's rows into their mailboxes, in order. Rows of unknown or ended requests are counted and dropped."""
        effects = Effects([], [], [])
        with self._lock:
            if batch.counts is None and batch.indexes is None and not batch.extras:
                self._deliver_plain(batch, effects.woken)
            else:
                self._deliver_rows(batch, effects)
            for row, code, stop_reason in batch.finishes:
                index = 0 if batch.indexes is None else batch.indexes[row]
                self._finish(batch.client_ids[row], index, FINISH_REASONS[code], stop_reason, effects)
        return effects

    def _deliver_plain(self, batch: StepBatch, woken: list[Waiter]) -> None:
        """One token per row and nothing else: the path that nearly every decode step takes."""
        find = self._open.get
        for client_id, token_id in zip(batch.client_ids, batch.token_ids, strict=True):
            box = find(client_id)
            if box is None or 0 not in box.open:
                self.counters["late_rows"] += 1
                continue
            box.rows.append(token_id)
            while box.waiters:
                woken.append(box.waiters.pop())

    def _deliver_rows(self, batch: StepBatch, effects: Effects) -> None:
        extras = dict(batch.extras)
        start = 0
        for row, client_id in enumerate(batch.client_ids):
            count = 1 if batch.counts is None else batch.counts[row]
            index = 0 if batch.indexes is None else batch.indexes[row]
            token_ids = batch.token_ids[start : start + count]
            start += count
            box = self._open.get(client_id)
            if box is None or index not in box.open:
                self.counters["late_rows"] += 1
                continue
            self._deliver_row(box, Tokens(index, token_ids, extras.get(row)), effects)

    def _deliver_row(self, box: Mailbox, item: Tokens, effects: Effects) -> None:
        extra = item.extra
        if item.token_ids or extra is not None:
            box.rows.append(item)
            take(box.waiters, effects.woken)
        if extra is None:
            return
        if extra.error is not None:
            error = RequestError(extra.error.message, field=extra.error.field, client_id=box.client_id)
            self._settle(box, Outcome("error", error), effects)
            return
        box.extra_in += size_of(extra)
        if box.extra_in - box.extra_out > self._mailbox_bytes:
            error = RequestError(
                f"more than {self._mailbox_bytes} bytes of results were left unread (ledger.mailbox_bytes)",
                client_id=box.client_id,
            )
            self._settle(box, Outcome("error", error), effects)
            effects.aborts.append(box.client_id)

    def _finish(
        self, client_id: int, index: int, reason: FinishReason | None, stop_reason: int | str | None, effects: Effects
    ) -> None:
        box = self._open.get(client_id)
        if box is None or index not in box.open:
            self.counters["late_rows"] += 1
            return
        box.rows.append(Finish(index, reason, stop_reason))
        box.open.discard(index)
        if box.open:
            take(box.waiters, effects.woken)
        else:
            self._settle(box, Outcome(reason or "finished"), effects)

    # -------------------------------------------------------------------------------------------------- settle

    def settle(self, client_id: int, outcome: Outcome = ABORTED) -> Effects | None:
        """Ends one request from this side; None where it has its outcome already, or is unknown."""
        effects = Effects([], [], [])
        with self._lock:
            box = self._open.get(client_id)
            if box is None:
                return None
            self._settle(box, outcome, effects)
        return effects

    def reply(self, message: ControlReply) -> list[Waiter]:
        """Ends a control call; a late or unknown reply is counted and dropped."""
        with self._lock:
            call = self._calls.pop(message.call_id, None)
            if call is None:
                self.counters["late_replies"] += 1
                return []
            call.values = message.values
            error = None if message.error is None else ControlError(message.error)
            call.outcome = FINISHED if error is None else Outcome("error", error)
            return call.waiters

    def sweep(self, error: TllmError) -> Effects:
        """Ends everything that is open with `error`, for good; later calls are refused with the first error."""
        effects = Effects([], [], [])
        with self._lock:
            if self._closed is None:
                self._closed = Outcome(type(error).__name__, error)
            for box in list(self._open.values()):
                self._settle(box, self._closed, effects)
            for call in self._calls.values():
                call.outcome = self._closed
                effects.woken.extend(call.waiters)
            self._calls.clear()
        return effects

    def disown(self, error: TllmError) -> None:
        """In a process that this one's was forked to, where nothing is delivered any more: ends everything that is open with
        `error`. Wakes nobody, for who waited was another thread, and those are not here; neither is who held the lock.
        """
        self._lock = threading.Lock()
        self.sweep(error)

    @property
    def closed(self) -> Outcome | None:
        """What it was swept with."""
        return self._closed

    def _settle(self, box: Mailbox, outcome: Outcome, effects: Effects) -> None:
        if outcome.error is None:
            reason = FINISH_REASONS[ABORT] if outcome is ABORTED else None
            box.rows.extend(Finish(index, reason, None) for index in sorted(box.open))
        box.open.clear()
        box.outcome = outcome
        del self._open[box.client_id]  # after its outcome: a fork in between has either the one or the other to go by
        take(box.waiters, effects.woken)
        take(box.final_waiters, effects.woken)
        effects.settled.append((box.client_id, outcome.reason))

    def open_ids(self) -> list[int]:
        """The ids of all requests without an outcome."""
        with self._lock:
            return list(self._open)

    def take_dropped(self) -> list[int]:
        """Ids whose consumer is gone."""
        ids = []
        while self.dropped:
            ids.append(self.dropped.popleft())
        return ids


def take(waiters: list[Waiter], woken: list[Waiter]) -> None:
    """Moves waiters over; one that is appended meanwhile is either moved or stays."""
    while waiters:
        woken.append(waiters.pop())


def size_of(extra: RowExtra) -> int:
    """Roughly the bytes that an unread extra holds; for the bound, not for accounting."""
    positions = [*(extra.logprobs or ()), *(extra.prompt_logprobs or ())]
    return 256 + sum(64 + 56 * len(position) for position in positions)
