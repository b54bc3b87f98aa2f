"""The worker with the echo engine and a link that is a pair of lists."""

import math
import os
import threading
from collections import Counter, deque

import pytest
from msgspec import convert

from tllm_core.contracts.interfaces import EngineContext, Identity
from tllm_core.contracts.messages import (
    FINISH_REASONS,
    Abort,
    Control,
    ControlReply,
    GenerationRequest,
    Goodbye,
    Introduce,
    Obituary,
    SamplingParams,
    StepBatch,
    Stop,
    Stopping,
    Submit,
    TokenIds,
)
from tllm_core.engines.echo import EchoSettings, expected_tokens
from tllm_core.engines.echo.engine import EchoEngine
from tllm_core.errors import FrameTooLarge
from tllm_core.world.progress import Progress, create_shared
from tllm_core.world.rows import rows_of
from tllm_core.world.vigil import Vigil
from tllm_core.world.worker import Worker, WorkerSettings, unwatched


class ListLink:
    """Hands the worker scripted commands, one item per call of `receive`, and then Stop; keeps what is sent.

    An item is a list of (session, message), or a callable to run when the loop comes to it.
    """

    def __init__(self, *script):
        self.script = deque(script)
        self.sent = []
        self.ended = {}
        self.counters = Counter()
        self.full = set()
        self.largest = None
        self.patience = []
        self.woken = threading.Event()

    @property
    def sessions(self):
        """All that a script names, but for those that were given up."""
        return [session for session in range(1 << 8) if session not in self.ended]

    def receive(self, timeout):
        self.patience.append(timeout)
        if timeout is None or timeout > 0:
            if self.woken.wait(0 if self.script or timeout is None else timeout):
                self.woken.clear()
                return []
        elif not self.script or self.script[0] != "idle":
            return self._next() if self.script else []
        return self._next() if self.script else [(0, Stop())]

    def _next(self):
        item = self.script.popleft()
        if item == "idle":
            return self._next() if self.script else [(0, Stop())]
        return item() or [] if callable(item) else item

    def send(self, session, message):
        if session in self.full:
            return False
        if self.largest and isinstance(message, StepBatch) and len(message.client_ids) > self.largest:
            raise FrameTooLarge("too large")
        self.sent.append((session, message))
        return True

    def broadcast(self, message):
        self.sent.append(("all", message))

    def end(self, session, reason):
        self.ended[session] = reason

    def wake(self):
        self.woken.set()

    def wait_woken(self):
        assert self.woken.wait(20)
        self.woken.clear()

    def of(self, kind, session=None):
        return [m for s, m in self.sent if isinstance(m, kind) and session in (None, s)]

    def rows(self, session=None):
        return [row for batch in self.of(StepBatch, session) for row in rows_of(batch)]

    def tokens(self, client_id, index=0):
        rows = [row for row in self.rows() if (row.client_id, row.index) == (client_id, index)]
        return [token for row in rows for token in row.token_ids]

    def finishes(self):
        return [(r.client_id, r.index, FINISH_REASONS[r.finish[0]]) for r in self.rows() if r.finish]

    def errors(self):
        return {r.client_id: r.extra.error for r in self.rows() if r.extra and r.extra.error}


class Context(EngineContext):
    rank, world_size, rendezvous = 0, 1, None

    def __init__(self):
        self.worker = None

    def wake(self):
        self.worker.wake()

    def phase(self, name, done=None):
        pass

    def adopt(self, pid):
        raise AssertionError


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def submit(client_id, prompt=(1, 2, 3), session=0, timeout_s=None, extra=None, **sampling):
    return odd(client_id, prompt, session, timeout_s=timeout_s, extra=extra, sampling=SamplingParams(**sampling))


def odd(client_id, prompt=(1, 2, 3), session=0, **fields):
    return (session, Submit(client_id, GenerationRequest(prompt_token_ids=TokenIds.of(prompt), **fields)))


def work(
    link,
    settings=WorkerSettings(),  # noqa: B008
    clock=None,
    watch=unwatched,
    excuse=lambda until: None,
    **engine_settings,
):
    engine = EchoEngine(convert(engine_settings, EchoSettings))
    context = Context()
    worker = Worker(
        engine, link, engine.start(context), settings=settings, watch=watch, excuse=excuse, clock=clock or Clock()
    )
    context.worker = worker
    try:
        worker.run()
    finally:
        engine.close()
    return worker, engine


def assert_nothing_is_left(worker, engine):
    assert worker._entries == {}
    assert not any(outbox.requests for outbox in worker._outboxes.values())
    assert engine.stats().running == engine.stats().waiting == 0


def test_one_batch_per_step_and_session_in_columns():
    link = ListLink([submit(1, max_tokens=2), submit(2, (7,), max_tokens=2), submit(3, session=5, max_tokens=1)])
    assert_nothing_is_left(*work(link))
    first, second = link.of(StepBatch, 0)
    assert first.client_ids == second.client_ids == [1, 2]
    assert (first.counts, first.indexes, first.finishes, first.extras) == (None, None, [], [])
    assert [finish[:2] for finish in second.finishes] == [(0, 2), (1, 2)]
    assert link.tokens(1) == expected_tokens([1, 2, 3], 2)
    assert link.tokens(2) == expected_tokens([7], 2)
    assert len(link.of(StepBatch, 5)) == 1
    assert link.sent[-1] == ("all", Stopping())


def test_sequences_and_uneven_counts_keep_their_columns():
    link = ListLink([submit(1, max_tokens=5, n=2), submit(2, (7,), max_tokens=4)])
    assert_nothing_is_left(*work(link, tokens_per_step=3))
    assert link.tokens(1, 1) == expected_tokens([1, 2, 3], 5, 1)
    assert link.tokens(1, 0) == expected_tokens([1, 2, 3], 5, 0)
    assert link.tokens(2) == expected_tokens([7], 4)
    assert sorted(link.finishes()) == [(1, 0, "length"), (1, 1, "length"), (2, 0, "length")]


def test_idle_it_waits_without_a_limit_and_busy_not_at_all():
    link = ListLink([submit(1, max_tokens=3)])
    work(link)
    assert link.patience[0] is None
    assert link.patience[1:3] == [0, 0]
    assert link.patience[-1] is None


def test_a_request_error_is_a_row_of_its_own_request():
    faults = [{"at": "submit", "do": "request_error", "token": 666, "message": "poison"}]
    link = ListLink([submit(1, max_tokens=2), submit(2, (666,), max_tokens=2), submit(3, max_tokens=2)])
    assert_nothing_is_left(*work(link, faults=faults))
    assert {client_id: error.message for client_id, error in link.errors().items()} == {2: "poison"}
    assert link.tokens(1) == link.tokens(3) == expected_tokens([1, 2, 3], 2)
    assert (2, 0, "error") in link.finishes()


def test_a_value_that_a_frontend_let_through_ends_its_request_alone():
    link = ListLink([submit(1, max_tokens=2, n=0), submit(2, max_tokens=2, logprobs=10**6), submit(3, max_tokens=2)])
    assert_nothing_is_left(*work(link))
    assert {client_id: error.field for client_id, error in link.errors().items()} == {1: "n", 2: "logprobs"}
    assert link.tokens(3) == expected_tokens([1, 2, 3], 2)


def test_an_error_inside_a_step_ends_that_request_with_all_its_sequences():
    faults = [{"at": "step", "do": "request_error", "token": 666, "after": 1}]
    link = ListLink([submit(1, max_tokens=3), submit(2, (666,), max_tokens=3, n=2)])
    assert_nothing_is_left(*work(link, faults=faults))
    assert list(link.errors()) == [2]
    assert len(link.tokens(1)) == 3


def test_an_abort_follows_its_request_and_is_quiet():
    link = ListLink([submit(1, max_tokens=50), submit(2, max_tokens=2), (0, Abort(1)), (0, Abort(1)), (0, Abort(99))])
    assert_nothing_is_left(*work(link))
    assert {row.client_id for row in link.rows()} == {2}


def test_rows_after_an_abort_are_dropped():
    link = ListLink([submit(1, max_tokens=50, n=2)], [(0, Abort(1))])
    assert_nothing_is_left(*work(link))
    assert link.tokens(1) == expected_tokens([1, 2, 3], 1)
    assert link.finishes() == []


def test_abort_all_and_goodbye_touch_their_own_session_only():
    link = ListLink(
        [submit(1, max_tokens=9), submit(2, session=5, max_tokens=9), submit(3, session=6, max_tokens=4)],
        [(0, Abort(None)), (5, Goodbye())],
    )
    worker, engine = work(link)
    assert_nothing_is_left(worker, engine)
    assert link.finishes() == [(3, 0, "length")]
    assert set(worker._outboxes) == {0, 6}


def test_a_second_request_of_a_live_client_id_leaves_the_first_unharmed():
    link = ListLink([submit(1, max_tokens=2), submit(1, (7,), max_tokens=2)])
    worker, _ = work(link)
    assert link.tokens(1) == expected_tokens([1, 2, 3], 2)
    assert worker.counters["duplicate_client_ids"] == 1


def test_a_deadline_ends_every_open_sequence_once():
    clock = Clock()

    def later():
        clock.now = 5.0

    link = ListLink([submit(1, timeout_s=4.0, n=2), submit(2, timeout_s=6.0, max_tokens=3)], later)
    worker, engine = work(link, clock=clock)
    assert sorted(link.finishes()) == [(1, 0, "timeout"), (1, 1, "timeout"), (2, 0, "length")]
    assert_nothing_is_left(worker, engine)


def test_a_deadline_wakes_an_idle_loop():
    link = ListLink([submit(1, timeout_s=4.0), (0, Control(1, "pause"))], "idle")
    work(link)
    assert 4.0 in link.patience


def test_a_spent_budget_times_out_at_once():
    clock = Clock()
    clock.now = 1e6
    link = ListLink([submit(1, timeout_s=1e-12)])
    work(link, clock=clock)
    assert link.finishes() == [(1, 0, "timeout")]


def short(value):
    return value if isinstance(value, str) and value.isidentifier() else type(value).__name__


SELF_REFERRING = {}
SELF_REFERRING["me"] = SELF_REFERRING


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("timeout_s", value) for value in (math.nan, math.inf, -1.0, 0, 10**400, 10**30, "soon")),
        *(("priority", value) for value in (2**70, -(2**70), 10**5000, 0.5)),
        *(("cache_salt", value) for value in (5, "\ud800")),
        *(("trace_context", value) for value in ("x", {"a": 1}, {"a": "\udfff"})),
        *(("extra", value) for value in (5, {1: 2}, {"a": object()}, {"a": 2**64}, SELF_REFERRING)),
        ("streaming", None),
        ("sampling", None),
    ],
    ids=short,
)
def test_whatever_a_frontend_lets_through_is_its_requests_error_alone(field, value):
    link = ListLink([odd(1, **{field: value}), submit(2, max_tokens=2)], "idle")
    worker, engine = work(link)
    assert link.errors()[1].field == field
    assert link.tokens(2) == expected_tokens([1, 2, 3], 2)
    assert_nothing_is_left(worker, engine)


@pytest.fixture
def progress():
    fd = create_shared()
    progress = Progress(fd)
    yield progress
    progress.close()
    os.close(fd)


@pytest.mark.parametrize("timeout_s", [math.nan, -1e9, -1e18, -math.inf, -1, "x"], ids=repr)
def test_a_call_with_a_wrong_timeout_is_refused_alone(progress, timeout_s):
    calls = [(0, Control(1, "ping", (), None, timeout_s)), (5, Control(2, "ping"))]
    link = ListLink(calls, [submit(1, max_tokens=1)])
    work(link, excuse=progress.excuse)
    refused, answered = link.of(ControlReply)
    assert "timeout must be a number of seconds, 0 or more" in refused.error
    assert answered.values == [[]]
    assert link.finishes() == [(1, 0, "length")]


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 10**400, 0, 0.5, None], ids=short)
def test_any_other_timeout_is_an_excuse_for_as_long(progress, timeout_s):
    """At most for ever, which is what the watcher reads."""
    seen = []

    def excuse(until):
        progress.excuse(until)
        progress.note(1, True)
        seen.append(progress.read(1e6)[1])

    link = ListLink([(0, Control(1, "ping", (), None, timeout_s))])
    work(link, excuse=excuse)
    assert link.of(ControlReply)[0].error is None
    assert seen == [timeout_s in (0, 0.5), True]


def test_a_process_number_that_is_none_is_not_believed():
    def watch(who, then):
        return Vigil().watch(Identity(-1, who.pid, who.start_time), then)

    link = ListLink([(0, Introduce("here", 2**70, 0)), (5, Introduce("here", -(2**40), 1)), submit(1, max_tokens=1)])
    worker, _ = work(link, watch=watch)
    assert worker.counters["odd_introductions"] == 2
    assert link.finishes() == [(1, 0, "length")]


def test_controls_are_answered_in_words():
    calls = [
        (0, Control(1, "ping", (1, "a"))),
        (0, Control(2, "fail", ("no way",))),
        (0, Control(3, "__init__")),
        (0, Control(4, "ping", (), (7,))),
        (0, Control(5, "sleep_for", ("x",))),
        (0, Control(6, "stats")),
    ]
    link = ListLink([submit(1, max_tokens=1)], calls)
    work(link)
    replies = {reply.call_id: reply for reply in link.of(ControlReply)}
    assert replies[1].values == [[1, "a"]]
    assert replies[2].error == "no way"
    assert "no control method '__init__'" in replies[3].error
    assert "no rank 7" in replies[4].error
    assert replies[5].error.startswith("TypeError")
    assert replies[6].values[0]["generated_tokens"] == 1
    assert replies[6].values[0]["extra"]["worker"]["sessions"] == 1


@pytest.mark.parametrize("at", ["submit", "step", "abort"])
def test_any_other_exception_is_the_death_of_the_engine_and_all_are_told(at):
    link = ListLink([submit(1, max_tokens=9)], [(0, Abort(1))])
    with pytest.raises(RuntimeError, match="bad knob"):
        work(link, faults=[{"at": at, "do": "raise", "message": "bad knob"}])
    session, obituary = link.sent[-1]
    assert session == "all"
    assert isinstance(obituary, Obituary)
    assert "bad knob" in obituary.message
    assert "Traceback" in obituary.traceback
    assert obituary.rank == 0


def test_a_self_driven_engine_is_stepped_when_it_wakes_the_loop():
    link = ListLink([submit(1, max_tokens=3)])
    link.script += [lambda: link.wait_woken()] * 2
    work(link, step_interval_s=0.01)
    assert link.tokens(1) == expected_tokens([1, 2, 3], 3)


# ----------------------------------------------------------------------------------------------------- parking


def fill(link, *sessions):
    return lambda: link.full.update(sessions)


def drain(link):
    return lambda: link.full.clear()


def nothing():
    return None


def test_a_full_lane_parks_its_rows_merged_and_hurts_nobody_else():
    link = ListLink()
    link.script += [
        fill(link, 0),
        [submit(1, max_tokens=6), submit(2, session=5, max_tokens=6)],
        nothing,
        nothing,
        drain(link),
    ]
    assert_nothing_is_left(*work(link))
    assert len(link.of(StepBatch, 5)) == 6
    assert len(link.of(StepBatch, 0)) < 6
    assert link.tokens(1) == link.tokens(2) == expected_tokens([1, 2, 3], 6)
    assert sorted(link.finishes()) == [(1, 0, "length"), (2, 0, "length")]


def test_what_is_parked_is_offered_again_while_the_engine_idles():
    link = ListLink()
    link.script += [fill(link, 0), [submit(1, max_tokens=2)], nothing, "idle", drain(link), "idle", nothing]
    work(link)
    assert link.tokens(1) == expected_tokens([1, 2, 3], 2)
    assert 0.005 in link.patience


def test_extras_are_merged_in_order_while_parked():
    link = ListLink()
    link.script += [fill(link, 0), [submit(1, max_tokens=4, logprobs=0, extra={"tag": 7})], *[nothing] * 5, drain(link)]
    work(link)
    (row,) = link.rows()
    assert [position[0].token_id for position in row.extra.logprobs] == row.token_ids == link.tokens(1)
    assert row.extra.extra == {"tag": 7}
    assert row.extra.metrics.generated_tokens == 4


def test_a_reply_waits_behind_parked_rows_and_is_not_lost():
    link = ListLink()
    link.script += [
        fill(link, 0),
        [submit(1, max_tokens=2), (0, Control(1, "ping"))],
        nothing,
        nothing,
        drain(link),
        nothing,
    ]
    work(link)
    assert [type(message) for _, message in link.sent[:2]] == [StepBatch, ControlReply]


@pytest.mark.parametrize(
    ("settings", "word"),
    [(WorkerSettings(parked_bytes=200), "parked_bytes"), (WorkerSettings(stall_after_s=1), "stall_after_s")],
)
def test_a_frontend_that_does_not_read_is_expelled_and_its_requests_aborted(settings, word):
    clock, link = Clock(), ListLink()

    def later():
        clock.now += 0.5

    link.script += [fill(link, 0), [submit(1, max_tokens=900), submit(2, session=5, max_tokens=20)], *[later] * 8]
    worker, engine = work(link, settings=settings, clock=clock)
    assert list(link.ended) == [0]
    assert word in link.ended[0]
    assert link.tokens(2) == expected_tokens([1, 2, 3], 20)
    assert_nothing_is_left(worker, engine)
    assert worker._dirty == {}


def test_what_an_expelled_frontend_had_said_begins_nothing():
    """The pulse had read it in the step after which the session was given up."""
    clock, link = Clock(), ListLink()

    def later():
        clock.now += 0.5

    link.script += [fill(link, 0), [submit(1, max_tokens=900)], *[later] * 8, [submit(2, max_tokens=900)]]
    worker, engine = work(link, settings=WorkerSettings(stall_after_s=2.0), clock=clock)
    assert list(link.ended) == [0]
    assert_nothing_is_left(worker, engine)
    assert worker._outboxes == {}


def test_a_batch_beyond_the_frame_limit_is_split():
    link = ListLink([submit(i, (i,), max_tokens=2) for i in range(1, 8)])
    link.largest = 2
    assert_nothing_is_left(*work(link))
    for i in range(1, 8):
        assert link.tokens(i) == expected_tokens([i], 2)


def test_a_row_that_fits_in_no_frame_fails_its_request_alone():
    link = ListLink([submit(1, (5,), max_tokens=3, extra={"pad_bytes": 10}), submit(2, max_tokens=3)])
    send = link.send

    def refusing(session, message):
        padded = isinstance(message, StepBatch) and any(extra.extra for _, extra in message.extras)
        if padded:
            raise FrameTooLarge("too large")
        return send(session, message)

    link.send = refusing
    assert_nothing_is_left(*work(link))
    assert "max_message_bytes" in link.errors()[1].message
    assert link.tokens(2) == expected_tokens([1, 2, 3], 3)
    assert Counter(client_id for client_id, _, _ in link.finishes()) == {1: 1, 2: 1}


class Watches:
    """Stands for the watch over frontends' processes: who is watched, and what each end calls."""

    def __init__(self):
        self.ends, self.forgotten = {}, []

    def __call__(self, who, then):
        self.ends[who.pid] = then
        return lambda: self.forgotten.append(who.pid)


def test_a_frontend_whose_process_ended_is_given_up_and_its_requests_are_aborted():
    watches = Watches()
    requests = [submit(1, session=5, max_tokens=100), submit(2, session=6, max_tokens=8)]
    link = ListLink(
        [(5, Introduce("host", 55, 1)), (6, Introduce("host", 66, 1)), *requests], lambda: watches.ends[55](), []
    )
    worker, engine = work(link, watch=watches)
    assert_nothing_is_left(worker, engine)
    assert link.ended == {5: "its process has ended"}
    assert worker.counters["lost_frontends"] == 1
    assert link.tokens(2) == expected_tokens([1, 2, 3], 8)


def test_a_session_that_ends_is_no_longer_watched():
    watches = Watches()
    link = ListLink([(5, Introduce("host", 55, 1)), (5, Introduce("host", 56, 1))], [(5, Goodbye())])
    worker, engine = work(link, watch=watches)
    assert watches.forgotten == [55]  # and a second introduction counts for nothing
    assert_nothing_is_left(worker, engine)
    watches.ends[55]()
    assert link.ended == {}
