"""Links with real threads over queues, well behaved and not."""

import contextlib
import itertools
import os
import pickle
import queue
import threading
import time

import pytest

from tllm_core.contracts.messages import (
    Abort,
    Beat,
    Control,
    ControlReply,
    EngineInfo,
    GenerationRequest,
    Goodbye,
    Obituary,
    StepBatch,
    Stop,
    Stopping,
    Submit,
    TokenIds,
)
from tllm_core.errors import Expelled, FrameTooLarge, Overloaded, PortClosed, Refused, TransportError
from tllm_core.wire.codec import encode
from tllm_core.wire.header import MESSAGE, Seal
from tllm_core.wire.link import EngineLink, FrontendLink
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.pump import NEVER
from tllm_core.wire.settings import WireSettings

KEY, OWNER, INFO = bytes(range(32)), b"o" * 16, EngineInfo(model="m")
QUICK = WireSettings(ack_delay_s=0.002, resend_after_s=0.01, resend_max_s=0.05, port_retry_s=0.001, hello_retry_s=0.01)
PATIENCE_S = 10.0
PROMPT = GenerationRequest(prompt_token_ids=TokenIds.of([1, 2, 3]))
_peers = itertools.count(1)


def until(condition) -> None:
    """Waits for a condition; a test that waits in vain fails."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class EchoingEngine:
    """Answers Submit with one batch per token of its prompt, and Control with its arguments; keeps all that it hears."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.heard: list = []
        self.error: BaseException | None = None
        self._stopping = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for session, message in self.link.receive(PATIENCE_S):
                    self.heard.append((session, message))
                    self._answer(session, message)
        except BaseException as error:
            self.error = error

    def _answer(self, session: int, message) -> None:
        if isinstance(message, Submit):
            for token in message.request.prompt_token_ids:
                self._send(session, StepBatch([message.client_id], [token]))
        elif isinstance(message, Control):
            self._send(session, ControlReply(message.call_id, message.args))

    def _send(self, session: int, message) -> None:
        while not self.link.send(session, message):
            for pair in self.link.receive(0.01):
                self.heard.append(pair)

    def stop(self) -> None:
        self._stopping = True
        self.link.wake()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture(params=[False, True], ids=["sealed", "by reference"])
def by_reference(request) -> bool:
    return request.param


@pytest.fixture
def lane(engine_port, connect):
    """Opens links whose ends are closed afterwards: lane(...) -> (engine, frontend's link)."""
    with contextlib.ExitStack() as stack:
        engines: list[EchoingEngine] = []

        def open_lane(*, settings=QUICK, reliable=True, by_reference=False, owner=b"", opened=True):
            if not engines:
                link = EngineLink(
                    engine_port,
                    key=KEY,
                    owner=OWNER,
                    info=INFO,
                    settings=settings,
                    reliable=reliable,
                    by_reference=by_reference,
                )
                engines.append(EchoingEngine(link))
                stack.callback(link.close, 0.0)
                stack.callback(engines[0].stop)
            peer = next(_peers).to_bytes(16, "little")
            front = FrontendLink(
                connect(peer),
                engine_port.address,
                peer=peer,
                key=KEY,
                owner=owner,
                settings=settings,
                reliable=reliable,
                by_reference=by_reference,
            )
            stack.callback(front.close)
            if opened:
                front.open(PATIENCE_S)
            return engines[0], front

        yield open_lane


def collect(front: FrontendLink, count: int) -> list:
    messages: list = []
    deadline = time.monotonic() + PATIENCE_S
    while len(messages) < count:
        messages += front.receive(0.05)
        assert time.monotonic() < deadline, f"only {len(messages)} of {count} came"
    return messages


def test_messages_go_both_ways_in_order(lane, by_reference) -> None:
    engine, front = lane(by_reference=by_reference)
    front.send(Submit(1, PROMPT))
    front.send(Control(4, "echo", [b"x", {"a": None}]))
    *batches, reply = collect(front, 4)
    assert [batch.token_ids for batch in batches] == [[1], [2], [3]]
    assert reply == ControlReply(4, [b"x", {"a": None}])
    assert [message for _, message in engine.heard] == [Submit(1, PROMPT), Control(4, "echo", [b"x", {"a": None}])]
    assert not front.counters
    assert not engine.link.counters


def test_nothing_stays_unacknowledged_once_both_sides_are_idle(lane, by_reference) -> None:
    engine, front = lane(by_reference=by_reference)
    front.send(Submit(1, PROMPT))
    collect(front, 3)
    until(lambda: front.receive(0.01) == [] and front.idle())
    until(lambda: front.receive(0.01) == [] and engine.link._sessions.is_idle)


@pytest.mark.parametrize(
    "faults",
    [
        {"lose": 0.2},
        {"double": 0.3},
        {"swap": 0.3},
        {"full": 0.3},
        {"lose": 0.1, "double": 0.1, "swap": 0.1, "full": 0.1},
    ],
)
def test_every_fault_of_an_unreliable_port_is_made_good(lane, network, faults) -> None:
    engine, front = lane(reliable=False)
    for name, value in faults.items():
        setattr(network, name, value)
    for call_id in range(100):
        front.send(Control(call_id, "echo", [call_id]))
    replies = collect(front, 100)
    assert [reply.call_id for reply in replies] == list(range(100))
    assert [message.call_id for _, message in engine.heard] == list(range(100))


def test_a_reconnect_of_a_reliable_port_is_made_good(lane, network) -> None:
    engine, front = lane()
    done = 0
    for _ in range(5):
        for call_id in range(done, done + 20):
            front.send(Control(call_id, "echo", []))
        network.lose = 1.0
        for call_id in range(done + 20, done + 40):
            front.send(Control(call_id, "echo", []))
        network.cut()
        network.lose = 0.0
        front.send(Control(done + 40, "echo", []))
        network.mend()
        engine.link.wake()
        assert [reply.call_id for reply in collect(front, 41)] == list(range(done, done + 41))
        done += 41


def test_a_port_that_was_seen_down_counts_as_reconnected(lane, network) -> None:
    _, front = lane()
    network.lose = 1.0
    front.send(Control(1, "echo", []))
    network.lose = 0.0
    network.cut()
    assert front.receive(0.0) == []
    network.down = False
    assert collect(front, 1) == [ControlReply(1, [])]


def test_an_attach_gets_through_a_port_that_loses_frames(lane, network) -> None:
    network.lose = 0.5
    _, front = lane(reliable=False)
    front.send(Control(1, "echo", []))
    assert collect(front, 1) == [ControlReply(1, [])]


PATIENT = LivenessSettings(frontend_beat_s=1800.0, frontend_dead_after_s=3600.0)
"""Nothing but the lane wakes a link that waits."""


@pytest.mark.parametrize("fault", ["lose", "full"])
def test_a_receiver_that_waits_without_limit_still_sends_again_in_time(engine_port, connect, network, fault) -> None:
    settings = WireSettings(resend_after_s=0.02, hello_retry_s=0.01, half_open_s=3600.0)
    common = {"key": KEY, "settings": settings, "liveness": PATIENT, "reliable": False}
    link = EngineLink(engine_port, info=INFO, **common)
    front = FrontendLink(connect(b"p" * 16), engine_port.address, peer=b"p" * 16, **common)
    heard: queue.SimpleQueue = queue.SimpleQueue()

    def read(end) -> None:
        with contextlib.suppress(PortClosed):
            while True:
                for message in end.receive(None):
                    heard.put(message)

    opening = threading.Thread(target=front.open, args=(PATIENCE_S,), daemon=True)
    opening.start()
    while opening.is_alive() or not link._sessions._table._by_peer:
        link.receive(0.01)
    readers = [threading.Thread(target=read, args=(end,), daemon=True) for end in (link, front)]
    for reader in readers:
        reader.start()
    until(lambda: link._waits_until > NEVER and front._waits_until > NEVER)
    setattr(network, fault, 1.0)
    front.send(Abort(1))
    link.send(link.sessions[0], StepBatch([1], [7]))
    network.heal()
    assert {type(heard.get(timeout=PATIENCE_S)) for _ in range(2)} == {tuple, StepBatch}
    front.close()
    engine_port.close()
    for reader in readers:
        reader.join(PATIENCE_S)
        assert not reader.is_alive()


def test_threads_submit_at_once_and_each_keeps_its_order(lane) -> None:
    engine, front = lane()

    def submit(thread: int) -> None:
        for n in range(100):
            front.send(Control(thread * 1000 + n, "echo", []))

    threads = [threading.Thread(target=submit, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    replies = [reply.call_id for reply in collect(front, 800)]
    for thread in threads:
        thread.join()
    assert replies == [message.call_id for _, message in engine.heard]
    for n in range(8):
        assert [call_id for call_id in replies if call_id // 1000 == n] == [n * 1000 + k for k in range(100)]


def test_submit_never_waits_for_an_engine_that_does_not_read(engine_port, connect) -> None:
    settings = WireSettings(window_frames=8, backlog_frames=8, hello_retry_s=0.01)
    link = EngineLink(engine_port, key=KEY, info=INFO, settings=settings)
    peer = b"p" * 16
    front = FrontendLink(connect(peer), engine_port.address, peer=peer, key=KEY, settings=settings)
    opening = threading.Thread(target=front.open, args=(PATIENCE_S,), daemon=True)
    opening.start()
    while opening.is_alive():
        link.receive(0.01)
    for n in range(16):
        front.send(Submit(n, PROMPT))
    with pytest.raises(Overloaded, match="try again later"):
        front.send(Submit(99, PROMPT))
    front.send(Abort(3))
    heard: list = []
    while len(heard) < 17:
        heard += [message for _, message in link.receive(0.01)]
        front.receive(0.01)
    assert heard == [*(Submit(n, PROMPT) for n in range(16)), Abort(3)]
    front.send(Submit(99, PROMPT))
    front.close()
    link.close(0.0)


def test_a_slow_frontend_is_told_apart_and_others_go_on(lane) -> None:
    engine, slow = lane(
        settings=WireSettings(window_frames=4, backlog_frames=4, ack_every_frames=1, hello_retry_s=0.01)
    )
    _, quick = lane(settings=QUICK)
    number = slow._session.number
    results = [engine.link.send(number, StepBatch([1], [n])) for n in range(20)]
    assert results == [True] * 8 + [False] * 12
    quick.send(Submit(1 << 48, PROMPT))
    assert len(collect(quick, 3)) == 3
    assert [batch.token_ids[0] for batch in collect(slow, 8)] == list(range(8))


def test_large_messages_are_refused_before_they_are_accepted(lane) -> None:
    _, front = lane(settings=WireSettings(max_message_bytes=4096, hello_retry_s=0.01))
    with pytest.raises(FrameTooLarge, match=r"Submit of \d+ bytes is over the limit of 4096 \(max_message_bytes\)"):
        front.send(Submit(1, GenerationRequest(prompt_token_ids=TokenIds.of(range(2000)))))
    front.send(Submit(2, PROMPT))
    assert len(collect(front, 3)) == 3


def test_messages_larger_than_a_frame_cross_whole_whatever_the_network_does(lane, network, engine_port) -> None:
    engine_port.max_frame = 400
    engine, front = lane(reliable=False)
    network.lose, network.double, network.swap = 0.1, 0.1, 0.1
    prompt = list(range(150))
    for number in range(3):
        front.send(Submit(number, GenerationRequest(prompt_token_ids=TokenIds.of(prompt))))
    front.send(Control(7, "say", ["x" * 2000, list(range(500))]))
    *batches, reply = collect(front, 451)
    assert [token for batch in batches for token in batch.token_ids] == prompt * 3
    assert list(reply.values) == ["x" * 2000, list(range(500))]
    assert max(sum(len(bytes(buffer)) for buffer in frame) for frame in network.seen) <= 400
    engine.stop()


def test_a_port_whose_limit_comes_down_loses_the_session_and_not_the_caller(lane, engine_port) -> None:
    engine, front = lane()
    front._port.limit = 400
    with contextlib.suppress(TransportError):
        front.send(Submit(1, GenerationRequest(prompt_token_ids=TokenIds.of(range(600)))))
    with pytest.raises(TransportError, match="can't be sent any more"):
        front.receive(0.1)
    engine.stop()


def test_receive_returns_early_for_a_wake_and_in_time_without_one(lane) -> None:
    engine, front = lane()
    assert front.receive(0.0) == []
    assert front.receive(0.01) == []
    thread = threading.Thread(target=front.receive, args=(None,), daemon=True)
    thread.start()
    front.wake()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    front.wake()
    assert front.receive(PATIENCE_S) == []
    engine.stop()


def test_a_wake_is_not_lost_behind_frames_without_a_message(lane) -> None:
    engine, front = lane(settings=WireSettings(ack_every_frames=1, hello_retry_s=0.01))
    done = threading.Event()

    def read() -> None:
        while front.receive(None):
            pass
        done.set()

    front.send(Abort(None))
    until(lambda: engine.heard)
    front.wake()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert done.wait(PATIENCE_S)
    thread.join()


def test_close_ends_a_blocked_receive(lane) -> None:
    _, front = lane()
    raised: list = []

    def read() -> None:
        try:
            front.receive(None)
        except PortClosed as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    front.close()
    front.close()
    thread.join(PATIENCE_S)
    assert raised
    for call in (lambda: front.send(Stop()), lambda: front.receive(0)):
        with pytest.raises(PortClosed):
            call()


def test_an_engine_that_is_not_there_is_named_after_the_timeout(engine_port, connect, network) -> None:
    front = FrontendLink(connect(b"p" * 16), engine_port.address, peer=b"p" * 16, key=KEY, settings=QUICK)
    with pytest.raises(TransportError, match=r"did not answer within 0.05 s"):
        front.open(0.05)
    network.cut()
    with pytest.raises(TransportError, match=r"no path: cut"):
        front.open(0.05)
    with pytest.raises(TransportError, match="not open"):
        front.send(Stop())
    assert front.counters["handshake_lost"]


def test_a_wrong_key_opens_nothing(lane, engine_port, connect) -> None:
    engine, _ = lane()
    front = FrontendLink(connect(b"q" * 16), engine_port.address, peer=b"q" * 16, key=b"x" * 32, settings=QUICK)
    with pytest.raises(TransportError, match="did not answer"):
        front.open(0.05)
    assert set(engine.link.counters) == {"bad_mac"}
    assert len(engine.link.sessions) == 1


def test_refuse_is_raised_with_its_reason(lane, monkeypatch) -> None:
    monkeypatch.setattr("tllm_core.wire.session.WIRE_VERSION", 9)
    monkeypatch.setattr("tllm_core.wire.session.MIN_WIRE_VERSION", 8)
    _, front = lane(opened=False)
    with pytest.raises(Refused, match="wire version 1, the frontend 8 to 9"):
        front.open(PATIENCE_S)


def test_an_expelled_frontend_reads_what_came_before_and_may_begin_anew(lane, by_reference) -> None:
    engine, front = lane(by_reference=by_reference)
    (number,) = engine.link.sessions
    assert engine.link.send(number, StepBatch([1], [7]))
    engine.link.end(number, "too slow for this test")
    (batch,) = collect(front, 1)
    assert batch.token_ids == [7]
    for call in (lambda: front.receive(1), lambda: front.receive(1), lambda: front.send(Submit(1, PROMPT))):
        with pytest.raises(Expelled, match="too slow for this test"):
            call()
    welcome = front.open(PATIENCE_S)
    front.send(Submit(welcome.frontend_id << 48, PROMPT))
    assert len(collect(front, 3)) == 3
    assert engine.link.sessions == (welcome.session,)
    assert all(session != number for session, message in engine.heard)


def test_goodbye_and_stop_reach_the_engine(lane) -> None:
    engine, front = lane()
    _, owner = lane(owner=OWNER)
    number, owners = front._session.number, owner._session.number
    front.send(Stop())
    front.send(Goodbye())
    owner.send(Stop())
    until(lambda: len(engine.heard) == 2)
    assert engine.heard == [(number, Goodbye()), (owners, Stop())]
    assert engine.link.sessions == (owners,)


def test_broadcast_reaches_all_and_close_waits_until_it_was_read(lane) -> None:
    engine, first = lane()
    _, second = lane()
    engine.stop()
    obituary = Obituary("the engine failed", rank=0, traceback="Traceback ...")
    engine.link.broadcast(obituary)
    engine.link.broadcast(Stopping())
    readers = [threading.Thread(target=collect, args=(front, 2), daemon=True) for front in (first, second)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    keep_reading = threading.Thread(
        target=lambda: [first.receive(0.01) + second.receive(0.01) for _ in range(20)], daemon=True
    )
    keep_reading.start()
    began = time.monotonic()
    engine.link.close(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
    assert engine.link._sessions.is_idle
    keep_reading.join()
    with pytest.raises(PortClosed):
        engine.link.receive(0)
    engine.link.close()


def test_close_does_not_wait_for_a_frontend_that_is_gone(lane) -> None:
    engine, front = lane()
    engine.stop()
    front.close()
    engine.link.broadcast(Stopping())
    began = time.monotonic()
    engine.link.close(0.05)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_reply_that_is_no_plain_data_fails_its_own_call(lane) -> None:
    engine, front = lane()
    (number,) = engine.link.sessions
    assert engine.link.send(number, ControlReply(1, [object()]))
    assert engine.link.send(number, ControlReply(2, [1]))
    failed, fine = collect(front, 2)
    assert "object can't cross a process boundary" in failed.error
    assert fine == ControlReply(2, [1])


def test_beats_pass_a_lane_that_is_full(lane) -> None:
    engine, front = lane(settings=WireSettings(window_frames=1, backlog_frames=1, hello_retry_s=0.01))
    (number,) = engine.link.sessions
    while engine.link.send(number, StepBatch([1], [1])):
        pass
    engine.link.beat(Beat(5, 77, True))
    collect(front, 1)
    until(lambda: front.receive(0.01) is not None and (beats := front.take_beats()) and beats[0].steps == 77)
    assert front.take_beats() == []


class Canary:
    """Would be noticed if anybody unpickled it."""

    hatched = 0

    def __reduce__(self):
        return hatch, ()


def hatch() -> None:
    Canary.hatched += 1


def test_hostile_frames_change_nothing_but_counters(lane, engine_port, network) -> None:
    engine, front = lane()
    _, watched = lane()
    session, number = watched._session, watched._session.number
    front.send(Submit(1, PROMPT))
    collect(front, 3)
    until(lambda: front.receive(0.01) == [] and front.idle() and engine.link._sessions.is_idle)
    recorded = list(network.seen)
    pickled = pickle.dumps(Canary())
    generation = engine_port.address.generation
    body = encode(Submit(1, PROMPT))[1]
    hostile = [
        [],
        [b""],
        [pickled],
        [os.urandom(72)],
        [os.urandom(72), pickled],
        [b"TLLM" + os.urandom(68), os.urandom(100)],
        Seal(b"x" * 32, generation, number, down=False).frame(MESSAGE, body, sequence=1),
        Seal(KEY, generation ^ 1, number, down=False).frame(MESSAGE, body, sequence=1),
        Seal(KEY, generation, number ^ 1, down=False).frame(MESSAGE, body, sequence=1),
        Seal(KEY, generation, number, down=True).frame(MESSAGE, body, sequence=0),
        Seal(KEY, generation, 0, down=False).frame(MESSAGE, body, sequence=1),
        Seal(KEY, generation, number, down=False).frame(MESSAGE, [pickled], sequence=5),
        Seal(KEY, generation, number, down=False).frame(MESSAGE, body, sequence=2**64 - 1),
        *([memoryview(bytes(buffer))[:-1] for buffer in frame] for frame in recorded),
        *([*frame, b"more"] for frame in recorded),
        *recorded,
    ]
    before = len(engine.heard)
    sessions = engine.link.sessions
    for frame in hostile:
        engine_port.inbox.put(frame)
        watched._port.inbox.put(frame)
        front._port.inbox.put(frame)
    until(lambda: engine_port.inbox.empty() and not watched.receive(0.01) and not front.receive(0.01))
    watched.send(Submit(1 << 48, PROMPT))
    assert [batch.token_ids for batch in collect(watched, 3)] == [[1], [2], [3]]
    front.send(Submit(2, PROMPT))
    assert [batch.token_ids for batch in collect(front, 3)] == [[1], [2], [3]]
    assert len(engine.heard) == before + 2
    assert engine.link.sessions == sessions
    assert session is watched._session
    assert Canary.hatched == 0
    assert engine.error is None
    for counters in (engine.link.counters, watched.counters, front.counters):
        assert {"truncated", "wrong_magic", "wrong_generation", "wrong_direction", "wrong_session"} <= set(counters)
    for counters in (engine.link.counters, front.counters):
        assert {"bad_mac", "duplicate"} <= set(counters)
    assert engine.link.counters["out_of_order"]
