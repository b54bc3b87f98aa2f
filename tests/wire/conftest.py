"""A small transport of queues whose frames are lost, doubled, overtaken, refused and cut off as a test wants."""

import queue
import random
import threading
import time
from dataclasses import dataclass, field

import pytest

from tllm_core.contracts.interfaces import PORT_UP, EngineAddress, EnginePort, FrontendPort, PortState
from tllm_core.errors import FrameTooLarge, PortClosed, PortDown, PortFull

GENERATION = 0x1234_5678_9ABC_DEF0
_WAKE = object()


@dataclass
class Network:
    """What happens to frames. `lose`, `double`, `swap`: probabilities. `full`: every so many sends the port has no room."""

    lose: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    full: float = 0.0
    down: bool = False
    reconnected_at: float = 0.0
    seen: list = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def heal(self) -> None:
        self.lose = self.double = self.swap = self.full = 0.0

    def cut(self) -> None:
        self.down = True

    def mend(self) -> None:
        self.reconnected_at = time.monotonic()
        self.down = False

    def carry(self, frame, inbox: queue.SimpleQueue, held: list) -> None:
        with self.lock:
            if self.down:
                raise PortDown("the test cut it")
            if self.dice.random() < self.full:
                raise PortFull("the test filled it")
            self.seen.append(frame)
            if self.dice.random() < self.lose:
                return
            frames = [frame, frame] if self.dice.random() < self.double else [frame]
            if self.dice.random() < self.swap and not held:
                held.extend(frames)
                return
            for one in (*frames, *held):
                inbox.put(one)
            held.clear()


class _QueuePort:
    max_frame = None

    def __init__(self, network: Network) -> None:
        self.network = network
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.held: list = []
        self.closed = False

    @property
    def state(self) -> PortState:
        if self.closed:
            return PortState(False, "closed", closed=True)
        if self.network.down:
            return PortState(False, "cut")
        since = self.network.reconnected_at
        return PortState(True, since=since) if since else PORT_UP

    def path_ok_at(self) -> float:
        return time.monotonic()

    def receive(self, timeout):
        if self.closed:
            raise PortClosed("closed")
        frames = []
        try:
            item = self.inbox.get(timeout=timeout) if timeout is None or timeout > 0 else self.inbox.get_nowait()
            while True:
                if item is not _WAKE:
                    frames.append(item)
                item = self.inbox.get_nowait()
        except queue.Empty:
            pass
        if self.closed:
            raise PortClosed("closed")
        return frames

    def wake(self) -> None:
        self.inbox.put(_WAKE)

    def close(self) -> None:
        self.closed = True
        self.inbox.put(_WAKE)


class QueueEnginePort(_QueuePort, EnginePort):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.address = EngineAddress(transport="queues", engine="engine", generation=GENERATION, endpoints={})
        self.frontends: dict[bytes, QueueFrontendPort] = {}
        self.forgotten: list[bytes] = []

    def send(self, to, frame) -> None:
        if self.closed:
            raise PortClosed("closed")
        port = self.frontends.get(to)
        if port is None:
            raise PortDown("nobody there")
        self.network.carry(frame, port.inbox, port.held)

    def forget(self, peer) -> None:
        self.forgotten.append(peer)


class QueueFrontendPort(_QueuePort, FrontendPort):
    def __init__(self, network: Network, engine: QueueEnginePort, peer: bytes) -> None:
        super().__init__(network)
        self.engine = engine
        self.max_frame = engine.max_frame
        self.limit: int | None = None
        engine.frontends[peer] = self

    def send(self, frame) -> None:
        if self.closed:
            raise PortClosed("closed")
        if self.limit is not None and sum(len(bytes(buffer)) for buffer in frame) > self.limit:
            raise FrameTooLarge(f"over {self.limit} bytes")
        self.network.carry(frame, self.engine.inbox, self.engine.held)


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def engine_port(network) -> QueueEnginePort:
    return QueueEnginePort(network)


@pytest.fixture
def connect(network, engine_port):
    """peer -> a frontend's port."""
    return lambda peer: QueueFrontendPort(network, engine_port, peer)
