"""Both ends of one lane at the level of ports, and how cases wait for what comes."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tllm_core.contracts.interfaces import EnginePort, Frame, FrontendPort, PeerId, Port, Transport
from tllm_core.errors import PortFull

ARRIVES_S = 20.0
ENDLESS = 10_000
"""So many large frames taken without a reader count as no bound at all."""
REFUSED_S = 2.0
"""Within which a full port refuses, on a busy machine: it is microseconds where nothing waits."""


class Pair:
    """An engine's port and its frontends', under a name of its own."""

    names = itertools.count()

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.name = f"engine-{secrets.token_hex(4)}-{next(self.names)}"
        self.engine: EnginePort = transport.listen(self.name, secrets.randbits(64))
        self.frontends: dict[PeerId, FrontendPort] = {}

    def frontend(self) -> tuple[PeerId, FrontendPort]:
        """A frontend that the engine knows, because it has heard from it."""
        peer = new_peer()
        port = self.frontends[peer] = self.transport.connect(self.engine.address, peer)
        port.send([b"hello"])
        assert received(self.engine) == [[b"hello"]]
        return peer, port

    def to(self, peer: PeerId) -> Callable[[Frame], None]:
        """Sends to that frontend."""
        return lambda frame: self.engine.send(peer, frame)

    def close(self) -> None:
        for port in (*self.frontends.values(), self.engine):
            port.close()


def new_peer() -> PeerId:
    return b"\x01" + secrets.token_bytes(15)


def plain(frames: Sequence[Frame]) -> list[list[bytes]]:
    """The frames as bytes."""
    return [[bytes(part) for part in frame] for frame in frames]


def received(port: Port, count: int = 1, timeout_s: float = ARRIVES_S) -> list[list[bytes]]:
    """The next frames, at least `count`, as bytes; none may keep it waiting for longer than `timeout_s`."""
    frames: list[Frame] = []
    deadline = time.monotonic() + timeout_s
    while len(frames) < count:
        more = port.receive(0.5)
        assert more or time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
        deadline = time.monotonic() + timeout_s if more else deadline
        frames += more
    return plain(frames)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs `work` in a thread; the list gets what it returned, or what it raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def joined(thread: threading.Thread) -> None:
    thread.join(ARRIVES_S)
    assert not thread.is_alive(), "a call did not return"


def until_blocked(thread: threading.Thread) -> None:
    """Gives a thread that goes into a blocking call the time to arrive there; either order must work."""
    thread.join(0.05)
    assert thread.is_alive(), "a call returned that had nothing to return for"


def fill(send: Callable[[int], None]) -> int:
    """How many were taken before PortFull, which must come at once."""
    for number in range(ENDLESS):
        began = time.monotonic()
        try:
            send(number)
        except PortFull:
            took = time.monotonic() - began
            assert took < REFUSED_S, f"it took {took:.1f} s to refuse a frame: send waits for room"
            return number
    return ENDLESS


def until_taken(send: Callable[[], None]) -> None:
    """Repeats what is refused with PortFull."""
    deadline = time.monotonic() + ARRIVES_S
    while True:
        try:
            return send()
        except PortFull:
            assert time.monotonic() < deadline, "it stays full although it is read"
            time.sleep(0.001)  # a port says that it is full, not when it has room again
