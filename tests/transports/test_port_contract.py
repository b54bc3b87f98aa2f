"""What `contracts/interfaces.py` promises of ports, on every transport of this room: the harness first, then the promises."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tllm_core.conformance.broker import nats_server
from tllm_core.contracts.interfaces import EnginePort, Frame, FrontendPort, PeerId, Port, Transport
from tllm_core.errors import PortClosed, PortDown, PortFull, TransportError
from tllm_core.transports.inproc import InprocSettings, InprocTransport
from tllm_core.transports.nats import NatsSettings, NatsTransport
from tllm_core.transports.redis import RedisSettings, RedisTransport
from tllm_core.transports.zmq import ZmqSettings, ZmqTransport

PATIENCE_S = 20.0
"""How long anything that must happen may take on a busy machine."""


def new_peer() -> PeerId:
    return b"\x01" + secrets.token_bytes(15)


def received(port: Port, count: int = 1) -> list[list[bytes]]:
    """The next `count` frames, as bytes."""
    frames: list[Frame] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(frames) < count:
        assert time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
        frames += port.receive(1.0)
    return [[bytes(part) for part in frame] for frame in frames]


class Lane:
    """An engine's port and its frontends', under a name of its own."""

    names = itertools.count()

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.engine: EnginePort = transport.listen(f"engine{next(self.names)}", secrets.randbits(64))
        self.frontends: dict[PeerId, FrontendPort] = {}

    def frontend(self) -> tuple[PeerId, FrontendPort]:
        """A frontend that the engine knows, because it has heard from it."""
        peer = new_peer()
        port = self.frontends[peer] = self.transport.connect(self.engine.address, peer)
        port.send([b"hello"])
        assert received(self.engine) == [[b"hello"]]
        return peer, port

    def close(self) -> None:
        for port in (*self.frontends.values(), self.engine):
            port.close()


@pytest.fixture(scope="module")
def nats() -> Iterator[str]:
    with nats_server(config="max_payload: 8MB") as server:
        yield server.url


HELD_BACK = ["inproc", "zmq-ipc", "zmq-tcp", "redis"]
held_back = pytest.mark.parametrize("make_transport", HELD_BACK, indirect=True)
"""Where a receiver that does not read holds its senders back; elsewhere it loses frames, and the lane's window is the bound."""


@pytest.fixture(params=[*HELD_BACK, "nats"])
def make_transport(request: pytest.FixtureRequest) -> Iterator[Callable[..., Transport]]:
    """Makes the transport under test; `queue_frames` bounds what it holds for one receiver, where given."""

    def make(queue_frames: int | None = None) -> Transport:
        if request.param == "inproc":
            return InprocTransport(InprocSettings(**({} if queue_frames is None else {"queue_frames": queue_frames})))
        if request.param == "redis":
            return RedisTransport(
                RedisSettings(
                    url=request.getfixturevalue("redis_url"), queue_bytes=1 << 28, queue_frames=queue_frames or 4096
                )
            )
        if request.param == "nats":
            return NatsTransport(NatsSettings(url=request.getfixturevalue("nats"), send_queue_bytes=1 << 28))
        options: dict[str, Any] = {"directory": directory, "protocol": request.param.removeprefix("zmq-")}
        if queue_frames is not None:
            options["high_water_frames"] = queue_frames
        return ZmqTransport(ZmqSettings(**options))

    with tempfile.TemporaryDirectory(prefix="tllm") as directory:
        yield make
        assert os.listdir(directory) == []


@pytest.fixture
def lane(make_transport: Callable[..., Transport]) -> Iterator[Lane]:
    with contextlib.closing(Lane(make_transport())) as lane:
        yield lane


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs `work` in a thread; the list gets what it returned or raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except TransportError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def joined(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def until_blocked(thread: threading.Thread) -> None:
    """Gives a thread that goes into a blocking call the time to arrive there; either order must work."""
    thread.join(0.05)
    assert thread.is_alive()


# ------------------------------------------------------------------------------------------------------ frames


def test_frames_cross_in_both_directions_with_their_buffers_kept_apart(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    frame = [b"head", memoryview(b"\0\1\2"), b"", b"tail" * 100]
    frontend.send(frame)
    lane.engine.send(peer, frame)
    expected = [[bytes(part) for part in frame]]
    assert received(lane.engine) == expected
    assert received(frontend) == expected


def test_frames_arrive_in_order_and_once(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    sent = [[str(number).encode()] for number in range(2000)]
    for frame in sent:
        frontend.send(frame)
        lane.engine.send(peer, frame)
    assert received(lane.engine, len(sent)) == sent
    assert received(frontend, len(sent)) == sent


def test_each_frontend_gets_its_own_frames_only(lane: Lane) -> None:
    frontends = [lane.frontend() for _ in range(8)]
    for number in range(50):
        for peer, _ in frontends:
            lane.engine.send(peer, [peer, str(number).encode()])
    for peer, port in frontends:
        assert received(port, 50) == [[peer, str(number).encode()] for number in range(50)]


def test_a_frame_of_the_size_of_a_megabyte_and_small_ones_around_it_keep_their_order(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    large = secrets.token_bytes(1 << 20)
    for frame in ([b"1"], [b"2", large], [b"3"]):
        lane.engine.send(peer, frame)
        frontend.send(frame)
    assert received(frontend, 3) == [[b"1"], [b"2", large], [b"3"]]
    assert received(lane.engine, 3) == [[b"1"], [b"2", large], [b"3"]]


def test_sixteen_threads_send_at_once_and_nothing_is_lost_or_mixed(lane: Lane) -> None:
    peer, frontend = lane.frontend()

    def send(port_send: Callable[[list[bytes]], None], sender: int) -> None:
        for number in range(200):
            port_send([b"%d" % sender, b"%d" % number, b"x" * (number * 400)])

    def to_peer(frame: list[bytes]) -> None:
        lane.engine.send(peer, frame)

    threads = [threading.Thread(target=send, args=(frontend.send, sender)) for sender in range(16)]
    threads += [threading.Thread(target=send, args=(to_peer, sender)) for sender in range(4)]
    for thread in threads:
        thread.start()
    for port, senders in ((lane.engine, 16), (frontend, 4)):
        got = defaultdict(list)
        for sender, number, filling in received(port, senders * 200):
            assert len(filling) == int(number) * 400
            got[int(sender)].append(int(number))
        assert got == {sender: list(range(200)) for sender in range(senders)}
    for thread in threads:
        joined(thread)


def test_a_late_joiner_loses_no_frame(make_transport: Callable[..., Transport]) -> None:
    for _ in range(30):
        lane = Lane(make_transport())
        peer, frontend = lane.frontend()
        lane.engine.send(peer, [b"first"])
        assert received(frontend) == [[b"first"]]
        lane.close()


# --------------------------------------------------------------------------------------------- waiting, waking


def test_receive_returns_nothing_after_its_timeout(lane: Lane) -> None:
    _, frontend = lane.frontend()
    for port in (lane.engine, frontend):
        started = time.monotonic()
        assert list(port.receive(0.02)) == []
        assert time.monotonic() - started >= 0.019
        assert list(port.receive(0)) == []


def test_a_blocked_receive_is_ended_by_a_frame(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    thread, outcome = in_thread(lambda: received(frontend))
    until_blocked(thread)
    lane.engine.send(peer, [b"x"])
    joined(thread)
    assert outcome == [[[b"x"]]]


def test_a_blocked_receive_gets_a_frame_although_its_port_sends_all_the_time(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    for number in range(50):
        thread, outcome = in_thread(lambda: frontend.receive(PATIENCE_S))
        lane.engine.send(peer, [b"%d" % number])
        while not outcome:
            with contextlib.suppress(PortFull):
                frontend.send([b"noise"])
            lane.engine.receive(0)
        joined(thread)
        assert [bytes(part) for frame in outcome[0] for part in frame] == [b"%d" % number]  # type: ignore[attr-defined]


def test_wake_ends_one_blocked_receive(lane: Lane) -> None:
    _, frontend = lane.frontend()
    for port in (lane.engine, frontend):
        thread, outcome = in_thread(lambda port=port: port.receive(None))  # type: ignore[misc]
        until_blocked(thread)
        port.wake()
        joined(thread)
        assert [list(frames) for frames in outcome] == [[]]  # type: ignore[call-overload]


def test_wake_before_receive_ends_the_next_one_and_only_that(lane: Lane) -> None:
    _, frontend = lane.frontend()
    for port in (lane.engine, frontend):
        port.wake()
        port.wake()
        assert list(port.receive(PATIENCE_S)) == []
        started = time.monotonic()
        assert list(port.receive(0.02)) == []
        assert time.monotonic() - started >= 0.019


def test_wakes_and_frames_from_many_threads_are_never_missed(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    told = threading.Event()

    def poke() -> None:
        for number in range(500):
            lane.engine.send(peer, [b"%d" % number])
            frontend.wake()
        told.set()
        frontend.wake()

    thread = threading.Thread(target=poke)
    thread.start()
    frames: list[bytes] = []
    while not (told.is_set() and len(frames) == 500):
        frames += [bytes(frame[0]) for frame in frontend.receive(PATIENCE_S)]
    joined(thread)
    assert frames == [b"%d" % number for number in range(500)]


# ------------------------------------------------------------------------------------------ full, down, closed


@held_back
def test_a_full_queue_refuses_at_once_and_recovers_when_it_is_read(make_transport: Callable[..., Transport]) -> None:
    with contextlib.closing(Lane(make_transport(queue_frames=16))) as lane:
        peer, frontend = lane.frontend()
        filling = b"x" * 65536
        for send, reader in ((frontend.send, lane.engine), (lambda frame: lane.engine.send(peer, frame), frontend)):
            taken = _fill(lambda number, send=send: send([b"%d" % number, filling]))  # type: ignore[misc]
            assert 0 < taken < ENDLESS
            assert [int(frame[0]) for frame in received(reader, taken)] == list(range(taken))
            _until_taken(lambda send=send: send([b"again"]))  # type: ignore[misc]
            assert received(reader) == [[b"again"]]


ENDLESS = 10_000


def _fill(send: Callable[[int], None]) -> int:
    """How many were taken before PortFull."""
    for number in range(ENDLESS):
        try:
            send(number)
        except PortFull:
            return number
    return ENDLESS


def _until_taken(send: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return send()
        except PortFull:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@held_back
def test_one_frontend_that_does_not_read_does_not_stop_another(make_transport: Callable[..., Transport]) -> None:
    with contextlib.closing(Lane(make_transport(queue_frames=16))) as lane:
        slow, _ = lane.frontend()
        quick, reader = lane.frontend()
        assert _fill(lambda _: lane.engine.send(slow, [b"x" * 65536])) < ENDLESS
        lane.engine.send(quick, [b"now"])
        assert received(reader) == [[b"now"]]


def test_an_unknown_peer_is_port_down(lane: Lane) -> None:
    with pytest.raises(PortDown):
        lane.engine.send(new_peer(), [b"x"])


def test_a_frontend_that_left_becomes_port_down_for_the_engine(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    frontend.close()

    def send_until_refused() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            lane.engine.send(peer, [b"x"])
            lane.engine.receive(0.001)

    with pytest.raises(PortDown):
        send_until_refused()
    lane.engine.forget(peer)


def test_a_name_is_refused_while_its_holder_lives_and_free_afterwards(make_transport: Callable[..., Transport]) -> None:
    first = make_transport().listen("model", 1)
    with pytest.raises(TransportError, match="model"):
        make_transport().listen("model", 2)
    first.close()
    second = make_transport().listen("model", 2)
    assert (second.address.engine, second.address.generation) == ("model", 2)
    second.close()


@pytest.mark.parametrize("side", ["engine", "frontend"])
def test_close_ends_a_blocked_receive(lane: Lane, side: str) -> None:
    _, frontend = lane.frontend()
    port: Port = lane.engine if side == "engine" else frontend
    thread, outcome = in_thread(lambda: port.receive(None))
    until_blocked(thread)
    port.close()
    joined(thread)
    assert isinstance(outcome[0], PortClosed)


def test_every_call_on_a_closed_port_says_so_or_does_nothing(lane: Lane) -> None:
    peer, frontend = lane.frontend()
    lane.engine.send(peer, [b"unread"])
    for port in (frontend, lane.engine):
        assert port.state.up
        port.close()
        port.close()
        port.wake()
        assert port.state.closed
        assert not port.state.up
        with pytest.raises(PortClosed):
            port.receive(0)
    with pytest.raises(PortClosed):
        frontend.send([b"x"])
    with pytest.raises(PortClosed):
        lane.engine.send(peer, [b"x"])


def test_close_from_many_threads_among_senders_and_a_reader(make_transport: Callable[..., Transport]) -> None:
    for _ in range(10):
        lane = Lane(make_transport())
        peer, frontend = lane.frontend()

        def spam(send: Callable[[], None]) -> None:
            while True:
                with contextlib.suppress(PortFull, PortDown):
                    send()

        work = [
            in_thread(lambda f=frontend: spam(lambda: f.send([b"x"]))),  # type: ignore[misc]
            in_thread(lambda e=lane.engine, p=peer: spam(lambda: e.send(p, [b"x"]))),  # type: ignore[misc]
            in_thread(lambda f=frontend: [f.receive(None) for _ in iter(int, 1)]),  # type: ignore[misc]
            in_thread(lambda e=lane.engine: [e.receive(None) for _ in iter(int, 1)]),  # type: ignore[misc]
        ]
        closers = [threading.Thread(target=port.close) for port in (frontend, lane.engine) * 3]
        for closer in closers:
            closer.start()
        for closer in closers:
            joined(closer)
        for thread, outcome in work:
            joined(thread)
            assert isinstance(outcome[0], PortClosed)


def test_frames_taken_before_close_still_arrive(lane: Lane) -> None:
    _, frontend = lane.frontend()
    other_peer, other = lane.frontend()
    for number in range(100):
        frontend.send([b"%d" % number])
        lane.engine.send(other_peer, [b"%d" % number])
    frontend.close()
    expected = [[b"%d" % number] for number in range(100)]
    assert received(lane.engine, 100) == expected
    lane.engine.close()
    assert received(other, 100) == expected


def test_descriptors_and_threads_are_gone_after_close(make_transport: Callable[..., Transport]) -> None:
    gc.collect()
    before = open_descriptors(), threading.active_count()
    for _ in range(5):
        lane = Lane(make_transport())
        for _ in range(3):
            lane.frontend()
        lane.close()
    assert (open_descriptors(), threading.active_count()) == before


def test_a_frontend_may_be_there_before_its_engine_reads(lane: Lane) -> None:
    ports = [lane.transport.connect(lane.engine.address, new_peer()) for _ in range(10)]
    for number, port in enumerate(ports):
        port.send([b"%d" % number])
    assert sorted(received(lane.engine, 10)) == [[b"%d" % number] for number in range(10)]
    for port in ports:
        port.close()
