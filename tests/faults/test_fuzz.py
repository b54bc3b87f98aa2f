"""Hostile peers on both ends of a lane: nothing that arrives changes anything but a counter, and the next request is answered.

A proxy of raw zmq sockets stands between a frontend and an engine. It passes real frames on, keeps some of them, and mixes in
garbage, truncated and bent frames, replays, frames with another key, generation, session or direction, and pickles with a
canary. `TLLM_FUZZ_FRAMES` sets how many (10,000 by default, half of them to each end).
"""

import os
import pickle
import random
import secrets
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.config import load_settings
from tllm_core.contracts.interfaces import EngineAddress, Frame, WorldSpec
from tllm_core.engines.echo import expected_tokens
from tllm_core.frontend import Frontend
from tllm_core.plan import Plan
from tllm_core.transports.zmq.packing import measure, pack
from tllm_core.wire.header import ACK, BEAT, GONE, HELLO, MESSAGE, REFUSE, STEP, WELCOME, Seal
from tllm_core.world.ready import Starting

FRAMES = int(os.environ.get("TLLM_FUZZ_FRAMES", "10000"))
KINDS = (HELLO, WELCOME, REFUSE, GONE, MESSAGE, STEP, ACK, BEAT)


class Canary:
    """Unpickling one leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.path}",))


class Hostile:
    """Makes frames that nobody should take, from real ones and from nothing. Parts are zmq message parts."""

    def __init__(self, seed: int, generation: int, canary: Path) -> None:
        self.random = random.Random(seed)
        self.generation = generation
        self.pickle = pickle.dumps(Canary(canary))
        self.genuine: list[list[bytes]] = []

    def keep(self, parts: list[bytes]) -> None:
        if len(self.genuine) < 64:
            self.genuine.append(parts)
        elif self.random.random() < 0.05:
            self.genuine[self.random.randrange(64)] = parts

    def parts(self) -> list[bytes]:
        makers = (self._garbage, self._bent, self._cut, self._replayed, self._forged, self._pickle, self._lengths)
        return self.random.choice(makers)()

    def _one(self) -> list[bytes]:
        return list(self.random.choice(self.genuine)) if self.genuine else self._garbage()

    def _garbage(self) -> list[bytes]:
        rng = self.random
        return [rng.randbytes(rng.choice((0, 1, 15, 16, 40, 72, 300))) for _ in range(rng.randint(1, 4))]

    def _bent(self) -> list[bytes]:
        parts = self._one()
        at = self.random.randrange(len(parts))
        if parts[at]:
            bent = bytearray(parts[at])
            bent[self.random.randrange(len(bent))] ^= 1 << self.random.randrange(8)
            parts[at] = bytes(bent)
        return parts

    def _cut(self) -> list[bytes]:
        parts = self._one()
        if len(parts) > 1 and self.random.random() < 0.5:
            return parts[: self.random.randint(1, len(parts) - 1)]
        return [parts[0][: self.random.randint(0, len(parts[0]))], *parts[1:]]

    def _replayed(self) -> list[bytes]:
        return self._one()

    def _forged(self) -> list[bytes]:
        rng = self.random
        generation = self.generation if rng.random() < 0.7 else rng.getrandbits(64)
        seal = Seal(rng.randbytes(32), generation, rng.choice((0, rng.getrandbits(64))), down=rng.random() < 0.5)
        payload = [rng.randbytes(rng.randint(0, 64)) for _ in range(rng.randint(0, 3))]
        frame = seal.frame(
            rng.choice(KINDS), payload, sequence=rng.getrandbits(rng.choice((3, 64))), ack=rng.getrandbits(8)
        )
        return _packed(frame)

    def _pickle(self) -> list[bytes]:
        seal = Seal(self.random.randbytes(32), self.generation, 0, down=self.random.random() < 0.5)
        return self.random.choice(([self.pickle], _packed(seal.frame(MESSAGE, [self.pickle])), _packed([self.pickle])))

    def _lengths(self) -> list[bytes]:
        """A packed frame whose table promises what isn't there."""
        count = self.random.randint(0, 255)
        return [bytes([count]) + struct.pack("<I", 0xFFFFFFFF) * self.random.randint(0, 3) + self.random.randbytes(8)]


def _packed(frame: Frame) -> list[bytes]:
    return [bytes(part) for part in pack(frame, measure(frame))]


class Middle:
    """Stands in for the engine towards one frontend and for that frontend towards the engine."""

    def __init__(self, engine: str, own: str, hostile_up: Hostile, hostile_down: Hostile) -> None:
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind(own)
        self._engine = engine
        self._hostile_up, self._hostile_down = hostile_up, hostile_down
        self._stop, self._fuzz = threading.Event(), threading.Event()
        self.sent = 0
        self._thread = threading.Thread(target=self._run, name="middle")
        self._thread.start()

    def fuzz(self, on: bool) -> None:
        self._fuzz.set() if on else self._fuzz.clear()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._context.term()

    def _run(self) -> None:
        back: zmq.Socket[bytes] | None = None
        peer = b""
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(1))
            if self._front in ready:
                peer, *parts = self._front.recv_multipart()
                if back is None:
                    back = self._context.socket(zmq.DEALER)
                    back.setsockopt(zmq.ROUTING_ID, peer)
                    back.connect(self._engine)
                    poller.register(back, zmq.POLLIN)
                self._hostile_up.keep(parts)
                back.send_multipart(parts)
            if back is not None and back in ready:
                parts = back.recv_multipart()
                self._hostile_down.keep(parts)
                self._front.send_multipart([peer, *parts])
            if back is not None and self._fuzz.is_set():
                for _ in range(10):
                    self._send(back, [], self._hostile_up)
                    self._send(self._front, [peer], self._hostile_down)
        if back is not None:
            back.close(linger=0)
        self._front.close(linger=0)

    def _send(self, socket: "zmq.Socket[bytes]", to: list[bytes], hostile: Hostile) -> None:
        try:
            socket.send_multipart([*to, *hostile.parts()], zmq.NOBLOCK)
            self.sent += 1
        except zmq.Again:  # its queue is full: the other end is still reading
            return


@pytest.fixture
def between(tmp_path: Path) -> Iterator[tuple[GenerationExecutor, Middle, Path]]:
    """An executor whose lane runs through the middle, and where the canary would sing."""
    canary = tmp_path / "canary"
    overrides = {"engine.name": "echo", "launcher.name": "inline", "transport.name": "zmq"}
    settings = load_settings(None, overrides=overrides)
    plan = Plan.of(settings)
    spec: WorldSpec = plan.world_spec(settings)
    world = plan.launcher.launch(spec)
    start = Starting(world, settings.liveness).wait()
    own = f"ipc://{tmp_path}/middle"
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    up, down = (Hostile(seed + i, spec.generation, canary) for i in range(2))
    middle = Middle(start.address.endpoints["zmq"], own, up, down)
    address = EngineAddress(
        transport="zmq", engine=start.address.engine, generation=start.address.generation, endpoints={"zmq": own}
    )
    link = plan.connect(address, spec, settings)
    welcome = link.open(30)
    with GenerationExecutor(Frontend(link, welcome.frontend_id, world), welcome.info, settings, plan) as executor:
        yield executor, middle, canary
    middle.close()


def test_nothing_hostile_changes_anything_but_counters(between: tuple[GenerationExecutor, Middle, Path]) -> None:
    executor, middle, canary = between
    params = SamplingParams(max_tokens=6)
    for i in range(20):  # genuine traffic to bend and replay
        assert executor.generate_async([i, 1], params).result(30).outputs[0].token_ids == expected_tokens([i, 1], 6)
    middle.fuzz(True)
    asked = 0
    while middle.sent < FRAMES:
        prompt = [asked % 1000, 2]
        result = executor.generate_async(prompt, params).result(60)
        assert result.outputs[0].token_ids == expected_tokens(prompt, 6)
        asked += 1
    middle.fuzz(False)
    assert executor.generate_async([3], params).result(60).outputs[0].token_ids == expected_tokens([3], 6)
    health = executor.health()
    assert health.ok
    assert health.in_flight == 0
    assert executor.stats().running == 0
    assert not canary.exists()
    dropped = {name: count for name, count in health.counters.items() if count}
    assert {"bad_mac", "wrong_generation", "truncated"} <= set(dropped), dropped
    print(f"{middle.sent} hostile frames, {asked} requests answered between them, the frontend dropped {dropped}")
