"""Ports and what lies between them. A frame is dropped, doubled, overtaken, delayed, corrupted, held up or cut off."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from tllm_core.contracts.interfaces import PORT_UP, EngineAddress, Frame, PeerId, PortState
from tllm_core.errors import PortClosed, PortDown, PortFull

from .timeline import GRAIN_S, NEVER, Actor, Blocked, Timeline
from .violation import Violation

SPINS = 2000
"""So many polls at one instant are a busy loop."""
KEPT = 48
"""Frames that the network remembers, for replays."""


class Weather(Struct, kw_only=True):
    """What happens to frames. Probabilities, seconds. `reliable`: only a reconnect loses any, and order is kept."""

    reliable: bool = True
    drop: float = 0.0
    overtake: float = 0.0
    double: float = 0.0
    corrupt: float = 0.0
    full: float = 0.0
    delay_s: float = 0.001
    jitter_s: float = 0.002
    high_water: int = 1000


class Line:
    """One direction of one path."""

    __slots__ = ("calm", "down", "epoch", "held", "network", "stuck", "tail_at", "target")

    def __init__(self, network: Network, target: Callable[[], Port | None], calm: float) -> None:
        self.network, self.target, self.calm = network, target, calm
        self.stuck = self.down = False
        self.held: list[Frame] = []
        self.epoch = 0
        self.tail_at = 0.0

    def carry(self, frame: Frame) -> None:
        network = self.network
        weather, chance = network.weather, network.rng.random
        target = self.target()
        if target is not None and len(target.inbox) >= weather.high_water:
            raise PortFull("the peer is too far behind")
        if weather.full and chance() < weather.full:
            raise PortFull("no room now")
        network.carried += 1
        if self.down:
            network.lost += 1
        elif weather.reliable:
            self.tail_at = max(self.tail_at, network.timeline.now + weather.delay_s + weather.jitter_s * chance())
            network.timeline.at(self.tail_at, self._arrive, frame, self.epoch)
        else:
            self._throw(frame, weather, chance)

    def _throw(self, frame: Frame, weather: Weather, chance: Callable[[], float]) -> None:
        network = self.network
        if chance() < weather.drop * self.calm:
            network.lost += 1
            return
        if weather.corrupt and chance() < weather.corrupt:
            frame = corrupted(frame, network.rng)
        for _ in range(2 if chance() < weather.double else 1):
            when = network.timeline.now + weather.delay_s + weather.jitter_s * chance()
            if chance() < weather.overtake:
                when += 2 * weather.jitter_s
            else:
                self.tail_at = when = max(self.tail_at, when)
            network.timeline.at(when, self._arrive, frame, self.epoch)

    def _arrive(self, frame: Frame, epoch: int) -> None:
        if epoch != self.epoch:
            self.network.lost += 1
        elif self.stuck:
            self.held.append(frame)
        elif (target := self.target()) is not None:
            target.put(frame)

    def release(self) -> None:
        """What was held up arrives after all."""
        self.stuck = False
        held, self.held = self.held, []
        for frame in held:
            self._arrive(frame, self.epoch)

    def lose(self) -> None:
        """All that is on its way is lost."""
        self.epoch += 1
        self.network.lost += len(self.held)
        self.held.clear()


class Port:
    """One end. What would block raises Blocked; a frame or `wake` runs its actor."""

    max_frame: int | None = None

    def __init__(self, network: Network) -> None:
        self.network, self.timeline = network, network.timeline
        self.inbox: deque[Frame] = deque()
        self.arrived_at: deque[float] = deque()
        self.actor: Actor | None = None
        self.state: PortState = PORT_UP
        self.closed = self.woken = self.keep_open = False
        self.broken_at: float | None = None
        self._polled_at, self._polls = -1.0, 0

    def path_ok_at(self) -> float:
        return self.timeline.now if self.broken_at is None else self.broken_at

    def receive(self, timeout: float | None) -> Sequence[Frame]:
        if self.closed:
            raise PortClosed("closed")
        now = self.timeline.now
        self._count_poll(now)
        if self.inbox:
            frames = list(self.inbox)
            self.inbox.clear()
            self.arrived_at.clear()
            self.woken = False
            self.network.remember(self, frames)
            return frames
        if self.woken:
            self.woken = False
            return []
        if timeout is not None and timeout <= 0:
            return []
        raise Blocked(NEVER if timeout is None else now + timeout + GRAIN_S)

    def _count_poll(self, now: float) -> None:
        if now != self._polled_at:
            self._polled_at, self._polls = now, 0
        self._polls += 1
        if self._polls > SPINS:
            raise Violation("I10", "a thread polls its port again and again and time does not pass")

    def put(self, frame: Frame) -> None:
        if not self.closed:
            self.inbox.append(frame)
            self.arrived_at.append(self.timeline.now)
            if self.actor is not None:
                self.actor.wake(self.timeline.now)

    def wake(self) -> None:
        self.woken = True
        if self.actor is not None:
            self.actor.wake(self.timeline.now)

    def moved(self, up: bool) -> None:
        """The connection was lost, or is back."""
        self.state = PortState(up, "" if up else "cut", since=self.timeline.now)
        self.wake()

    def close(self) -> None:
        if not self.keep_open:
            self.closed = True
            self.wake()


class FrontendPort(Port):
    """A frontend's end; `service` names whom it talks to, whoever that is by now."""

    def __init__(self, network: Network, service: str, peer: PeerId) -> None:
        super().__init__(network)
        self.path = network.connect(self, service, peer)
        self.sent = 0
        self.inspect: Callable[[Frame], None] = lambda frame: None

    def send(self, frame: Frame) -> None:
        if self.closed:
            raise PortClosed("closed")
        if not self.state.up:
            raise PortDown("cut")
        self.sent += 1
        self.inspect(frame)
        self.path.up.carry(frame)


class EnginePort(Port):
    """The end of an engine, or of a watcher. The newest one that listens gets what is sent to the service."""

    def __init__(self, network: Network, service: str, generation: int) -> None:
        super().__init__(network)
        self.address = EngineAddress(transport="sim", engine=service, generation=generation, endpoints={})
        self.service = service
        self.forgotten = 0
        self.inspect: Callable[[Frame], None] = lambda frame: None
        network.services[service] = self

    def send(self, to: PeerId, frame: Frame) -> None:
        if self.closed:
            raise PortClosed("closed")
        path = self.network.paths.get((self.service, to))
        if path is None or path.port.closed or not path.port.state.up:
            raise PortDown("nobody there")
        self.inspect(frame)
        path.down.carry(frame)

    def forget(self, peer: PeerId) -> None:
        self.forgotten += 1


class Path:
    """Both directions between one frontend's port and one service."""

    def __init__(self, network: Network, port: FrontendPort, service: str) -> None:
        self.network, self.port, self.service = network, port, service
        calm = 0.3 if service.startswith("watch") else 1.0
        self.up = Line(network, lambda: network.services.get(service), calm)
        self.down = Line(network, lambda: port, calm)

    @property
    def is_whole(self) -> bool:
        return self.port.broken_at is None

    def cut(self) -> None:
        """A reliable connection is lost with all that is on its way; elsewhere frames just vanish."""
        if not self.is_whole:
            return
        self.port.broken_at = self.network.timeline.now
        if self.network.weather.reliable:
            self.up.lose()
            self.down.lose()
            self._move(False)
        self.up.down = self.down.down = True

    def stall(self) -> None:
        """Frames are held up, and none is lost."""
        if self.is_whole:
            self.port.broken_at = self.network.timeline.now
            self.up.stuck = self.down.stuck = True

    def mend(self) -> None:
        if self.is_whole:
            return
        self.port.broken_at = None
        was_cut = self.up.down
        self.up.down = self.down.down = False
        self.up.release()
        self.down.release()
        if was_cut and self.network.weather.reliable:
            self._move(True)

    def _move(self, up: bool) -> None:
        self.port.moved(up)
        engine = self.network.services.get(self.service)
        if engine is not None and not engine.closed:
            engine.moved(True)


class Network:
    """All paths, and what the weather is like on them."""

    def __init__(self, timeline: Timeline, weather: Weather, rng: random.Random) -> None:
        self.timeline, self.weather, self.rng = timeline, weather, rng
        self.services: dict[str, EnginePort] = {}
        self.paths: dict[tuple[str, PeerId], Path] = {}
        self.carried = self.lost = 0
        self.history: deque[tuple[Port, Frame]] = deque(maxlen=KEPT)

    def connect(self, port: FrontendPort, service: str, peer: PeerId) -> Path:
        path = self.paths[service, peer] = Path(self, port, service)
        return path

    def remember(self, port: Port, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.history.append((port, frame))

    def calm_down(self) -> None:
        """Nothing is lost any more where there is a path."""
        weather = self.weather
        weather.drop = weather.overtake = weather.double = weather.corrupt = weather.full = 0.0


def corrupted(frame: Frame, rng: random.Random) -> Frame:
    """A copy with one byte changed, or cut short."""
    parts: list[Any] = [bytes(part) for part in frame]
    at = rng.randrange(len(parts))
    part = bytearray(parts[at])
    if not part or rng.random() < 0.2:
        parts[at] = bytes(part[:-1])
    else:
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        parts[at] = bytes(part)
    return parts
