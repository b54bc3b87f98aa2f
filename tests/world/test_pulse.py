"""While a step takes long, the lane lives on: acknowledgements, attaches, and every command in its order afterwards."""

import secrets
import threading
import time
from contextlib import ExitStack

import pytest

from tllm_core.contracts.interfaces import Capability, Engine
from tllm_core.contracts.messages import (
    Abort,
    Control,
    ControlReply,
    EngineInfo,
    GenerationRequest,
    Output,
    Step,
    StepBatch,
    Submit,
    TokenIds,
)
from tllm_core.registry import Registry
from tllm_core.wire.link import EngineLink, FrontendLink
from tllm_core.world.pulse import Pulse
from tllm_core.world.worker import Worker

KEY, INFO = b"k" * 32, EngineInfo(model="gated", controls=frozenset({"mark"}))
PATIENCE_S = 20.0


class Gated(Engine):
    """Its steps wait for the gate; `heard` is what it was told, in order."""

    def __init__(self) -> None:
        self.gate, self.inside = threading.Event(), threading.Event()
        self.heard: list = []

    def start(self, context):
        return INFO

    def submit(self, request):
        self.heard.append(("submit", request.request_id))

    def abort(self, request_id):
        self.heard.append(("abort", request_id))

    def control(self, method, args, ranks):
        self.heard.append((method, *args))
        return [None]

    def step(self):
        self.inside.set()
        assert self.gate.wait(PATIENCE_S)
        submitted = [request_id for word, request_id, *_ in self.heard if word == "submit"]
        return Step(
            [Output(request_id=request_id, token_ids=[7], finish_reason="length") for request_id in submitted],
            again=False,
        )


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(params=["inproc", "zmq"])
def world(request):
    """(engine, connect): a worker with a pulse, and frontends' links to it."""
    kind = Registry().transport(request.param)
    by_reference = Capability.CROSS_PROCESS not in kind.capabilities
    transport = kind(kind.settings_type())
    with ExitStack() as closers:
        port = transport.listen(f"pulse-{secrets.token_hex(4)}", secrets.randbits(63))
        link = EngineLink(port, key=KEY, info=INFO, by_reference=by_reference)
        closers.callback(link.close, 0.2)
        pulse = Pulse(link, after_s=0.01)
        closers.callback(pulse.close)
        engine = Gated()
        worker = Worker(engine, link, INFO, pulse=pulse)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        closers.callback(thread.join, PATIENCE_S)
        closers.callback(worker.stop)
        closers.callback(engine.gate.set)

        def connect() -> FrontendLink:
            peer = b"\1" + secrets.token_bytes(15)
            front = FrontendLink(
                transport.connect(port.address, peer), port.address, peer=peer, key=KEY, by_reference=by_reference
            )
            closers.callback(front.close)
            front.open(PATIENCE_S)
            return front

        yield engine, connect
    assert not thread.is_alive()


def submit(front: FrontendLink, client_id: int) -> None:
    front.send(Submit(client_id, GenerationRequest(prompt_token_ids=TokenIds.of([1]))))


def test_a_long_step_holds_up_neither_acknowledgements_nor_attaches(world) -> None:
    engine, connect = world
    front = connect()
    submit(front, 1)
    assert engine.inside.wait(PATIENCE_S)
    front.send(Control(5, "mark", ["first"]))
    until(lambda: front.receive(0.01) == [] and front.idle())
    second = connect()
    assert second.idle() or second.receive(0.01) == []
    assert engine.heard == [("submit", 1)]  # the engine itself heard nothing meanwhile


def test_what_came_during_a_long_step_is_taken_afterwards_in_order(world) -> None:
    engine, connect = world
    front = connect()
    high_bits = 0
    submit(front, high_bits + 1)
    assert engine.inside.wait(PATIENCE_S)
    for number in range(2, 6):
        submit(front, number)
        front.send(Control(number, "mark", [number]))
    front.send(Abort(5))
    until(lambda: front.receive(0.01) == [] and front.idle())
    engine.gate.set()
    messages: list = []
    until(lambda: messages.extend(front.receive(0.05)) or len(messages) > 5)
    until(lambda: messages.extend(front.receive(0.05)) or finished(messages) == {1, 2, 3, 4})
    expected = [("submit", 1)]
    for number in range(2, 6):
        expected += [("submit", number), ("mark", number)]
    assert engine.heard == [*expected, ("abort", 5)]
    assert [m.call_id for m in messages if isinstance(m, ControlReply)] == [2, 3, 4, 5]


def finished(messages) -> set[int]:
    return {b.client_ids[row] for b in messages if isinstance(b, StepBatch) for row, _, _ in b.finishes or ()}


def test_short_steps_never_meet_the_thread(world) -> None:
    engine, connect = world
    engine.gate.set()
    front = connect()
    for number in range(1, 200):
        submit(front, number)
    seen: list = []
    until(lambda: seen.extend(front.receive(0.05)) or len(finished(seen)) == 199)


class Bell:
    """A lane on which nothing ever comes but wake-ups, each for one reader."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self.reads = 0

    def receive(self, timeout: float | None) -> list:
        self.reads += 1
        self._rung.wait(timeout)
        self._rung.clear()
        return []

    def wake(self) -> None:
        self._rung.set()


def test_a_wake_that_the_thread_took_is_not_lost_for_the_worker() -> None:
    """The worker had looked, and decided to wait; then the engine woke it, while the thread was still at the lane."""
    bell = Bell()
    pulse = Pulse(bell, after_s=0.005)  # type: ignore[arg-type]
    pulse.busy()
    until(lambda: bell.reads > 0)
    reads = bell.reads
    bell.wake()
    until(lambda: bell.reads > reads)
    worker = threading.Thread(target=pulse.receive, args=(None,), daemon=True)
    worker.start()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    pulse.close()
