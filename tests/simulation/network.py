"""Ports and what lies between them. A frame is dropped, doubled, overtaken, delayed, corrupted, held up or cut off."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from tllm_core.contracts.interfaces import PORT_UP, EngineAddress, Frame, PeerId, PortState
from tllm_core.errors import FrameTooLarge, PortClosed, PortDown, PortFull
from tllm_core.wire.header import size_of

from .timeline import GRAIN_S, NEVER, Actor, Blocked, Process, Timeline
from .violation import Violation

SPINS = 2000
"""So many polls at one instant are a busy loop."""
KEPT = 48
"""Frames that the network remembers, for replays."""


class Weather(Struct, kw_only=True):
    """What happens to frames. Probabilities, seconds. `reliable`: only a reconnect loses any, and order is kept.

    `engine_hears`: its port notices that a frontend's connection was lost and is back. `broker`: every port has a way of its
    own to a broker, which loses what is for somebody who is not connected, and what is too much (`high_water`) for somebody
    slow; nobody hears of either. Paths are proven every `proof_s`.
    """

    reliable: bool = True
    engine_hears: bool = True
    broker: bool = False
    proof_s: float = 0.0
    max_frame: int | None = None
    drop: float = 0.0
    overtake: float = 0.0
    double: float = 0.0
    corrupt: float = 0.0
    full: float = 0.0
    delay_s: float = 0.001
    jitter_s: float = 0.002
    high_water: int = 1000


class SlowProbe(Struct, frozen=True):
    """Each proof of a path takes `each_s`, one after the other, until `until`; frames pass all the while."""

    began_at: float
    each_s: float
    until: float

    def proven_at(self, now: float) -> float:
        """When the last one that was answered had been asked for."""
        answered = int((now - self.began_at) / self.each_s)
        return self.began_at + max(0, answered - 1) * self.each_s


WHOLE, CUT, STUCK = range(3)
"""How a port is connected: frames pass, are lost, or are held up."""


class Line:
    """One direction of the path between a frontend's port and a service, whoever that is by now."""

    __slots__ = ("_is_up", "_port", "_service", "_services", "calm", "epoch", "held", "network", "tail_at")

    def __init__(self, network: Network, port: FrontendPort, service: str, *, up: bool) -> None:
        self.network, self._services = network, network.services
        self._port, self._service, self._is_up = port, service, up
        self.calm = 0.3 if service.startswith("watch") else 1.0
        self.held: list[Frame] = []
        self.epoch = 0
        self.tail_at = 0.0

    def carry(self, frame: Frame, source: Port) -> None:
        network = self.network
        weather, chance = network.weather, network.rng.random
        target = self._services.get(self._service) if self._is_up else self._port
        if target is not None and len(target.inbox) >= weather.high_water and not weather.broker:
            raise PortFull("the peer is too far behind")
        if weather.full and chance() < weather.full:
            raise PortFull("no room now")
        network.carried += 1
        if source.leg == CUT or (target is not None and target.leg == CUT and not weather.broker):
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
        engine = self._services.get(self._service)
        target, source = (engine, self._port) if self._is_up else (self._port, engine)
        if epoch != self.epoch or target is None or target.leg == CUT:
            self.network.lost += 1
        elif target.leg == STUCK or (source is not None and source.leg == STUCK):
            self.held.append(frame)
            self._drop_some(self.held)
        else:
            target.put(frame)
            self._drop_some(target.inbox)

    def _drop_some(self, waiting: list[Frame]) -> None:
        """A broker keeps so much for a slow consumer: the newest goes, or one from the middle."""
        weather = self.network.weather
        if weather.broker and len(waiting) > weather.high_water:
            self.network.lost += 1
            at = len(waiting) - 1 if self.network.rng.random() < 0.5 else len(waiting) // 2
            del waiting[at]

    def release(self) -> None:
        """What was held up arrives after all."""
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

    def __init__(self, network: Network) -> None:
        self.network, self.timeline = network, network.timeline
        self.inbox: list[Frame] = []
        self.oldest_at = NEVER
        """Since when the first frame of the inbox has been there."""
        self.actor: Actor | None = None
        self.state: PortState = PORT_UP
        self.closed = self.woken = self.keep_open = False
        self.max_frame = network.weather.max_frame
        self.leg = WHOLE
        self.broken_at: float | None = None
        self.whole_since = self.timeline.now
        self.outages: list[tuple[float, float]] = []
        """Of the own way: those that are over."""
        self.process: Process | None = None
        self.slow_probe: SlowProbe | None = None
        self._polled_at, self._polls = -1.0, 0

    def path_ok_at(self) -> float:
        """Proofs come at their times, while the way is whole and the process runs."""
        now = self.timeline.now
        at = now if self.broken_at is None else self.broken_at
        if self.slow_probe is not None and now < self.slow_probe.until:
            at = min(at, self.slow_probe.proven_at(now))
        process = self.process
        if process is not None and process.frozen_at is not None:
            at = min(at, process.frozen_at)
        proof_s = self.network.weather.proof_s
        return max(at // proof_s * proof_s, min(at, self.whole_since)) if proof_s else at

    # ------------------------------------------------------------------------------------------------ its own way

    def lines(self) -> list[Line]:
        raise NotImplementedError

    def cut(self) -> None:
        """A connection is lost with all that is on its way; where nothing is connected frames just vanish."""
        if self.broken_at is None:
            self.broken_at, self.leg = self.timeline.now, CUT
            weather = self.network.weather
            if weather.reliable or weather.broker:
                for line in self.lines():
                    line.lose()
                self.timeline.later(self.network.notice_s(), self._show, self.broken_at)

    def _show(self, since: float) -> None:
        """What the client library makes of it."""
        if self.broken_at == since:
            self.moved(False)

    def stall(self) -> None:
        """Frames are held up, and none is lost."""
        if self.broken_at is None:
            self.broken_at, self.leg = self.timeline.now, STUCK

    def mend(self) -> None:
        if self.broken_at is None:
            return
        now = self.timeline.now
        self.outages.append((self.broken_at, now))
        was_cut, self.leg = self.leg == CUT, WHOLE
        self.broken_at, self.whole_since = None, now
        for line in self.lines():
            line.release()
        weather = self.network.weather
        if was_cut and (weather.reliable or weather.broker):
            self.moved(True)

    def down_s(self, since: float) -> float:
        """For how long the way is, or was the last time, broken after `since`."""
        if self.broken_at is not None:
            return self.timeline.now - max(since, self.broken_at)
        return self.outages[-1][1] - max(since, self.outages[-1][0]) if self.outages else 0.0

    def receive(self, timeout: float | None) -> Sequence[Frame]:
        if self.closed:
            raise PortClosed("closed")
        now = self.timeline.now
        if now != self._polled_at:
            self._polled_at, self._polls = now, 0
        self._polls += 1
        if self._polls > SPINS:
            raise Violation("I10", "a thread polls its port again and again and time does not pass")
        if self.inbox:
            frames, self.inbox = self.inbox, []
            self.oldest_at = NEVER
            self.woken = False
            self.network.history.extend(frames)
            return frames
        if self.woken:
            self.woken = False
            return []
        if timeout is not None and timeout <= 0:
            return []
        raise Blocked(NEVER if timeout is None else now + timeout + GRAIN_S)

    def put(self, frame: Frame) -> None:
        if not self.closed:
            now = self.timeline.now
            if not self.inbox:
                self.oldest_at = now
            self.inbox.append(frame)
            if self.actor is not None:
                self.actor.wake(now)

    def measure(self, frame: Frame) -> None:
        if len(frame) > 1 and (size := sum(map(size_of, frame))) > self.max_frame:
            raise FrameTooLarge(f"{size} bytes in a frame of at most {self.max_frame}")

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
        if self.max_frame is not None:
            self.measure(frame)
        self.sent += 1
        self.inspect(frame)
        self.path.up.carry(frame, self)

    def lines(self) -> list[Line]:
        return [self.path.up, self.path.down]

    def moved(self, up: bool) -> None:
        """Where they are connected to each other the engine's end sees it too."""
        super().moved(up)
        engine = self.network.services.get(self.path.service)
        if engine is not None and not engine.closed and self.network.weather.engine_hears:
            engine.moved(True)


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
        if not self.state.up:
            raise PortDown("cut")
        if self.max_frame is not None:
            self.measure(frame)
        path, broker = self.network.paths.get((self.service, to)), self.network.weather.broker
        if path is None or path.port.closed or not path.port.state.up:
            if broker:
                return  # it was published, and nobody listened
            raise PortDown("nobody there")
        self.inspect(frame)
        path.down.carry(frame, self)

    def lines(self) -> list[Line]:
        paths = [path for (service, _), path in self.network.paths.items() if service == self.service]
        return [line for path in paths for line in (path.up, path.down)]

    def forget(self, peer: PeerId) -> None:
        self.forgotten += 1


class Path:
    """Both directions between one frontend's port and one service."""

    def __init__(self, network: Network, port: FrontendPort, service: str) -> None:
        self.port, self.service = port, service
        self.up, self.down = Line(network, port, service, up=True), Line(network, port, service, up=False)


class Network:
    """All paths, and what the weather is like on them."""

    def __init__(self, timeline: Timeline, weather: Weather, rng: random.Random) -> None:
        self.timeline, self.weather, self.rng = timeline, weather, rng
        self.services: dict[str, EnginePort] = {}
        self.paths: dict[tuple[str, PeerId], Path] = {}
        self.carried = self.lost = 0
        self.history: deque[Frame] = deque(maxlen=KEPT)

    def notice_s(self) -> float:
        """How soon a client library sees that its connection is lost."""
        return self.rng.random() * 0.05 if self.weather.broker else 0.0

    def connect(self, port: FrontendPort, service: str, peer: PeerId) -> Path:
        path = self.paths[service, peer] = Path(self, port, service)
        return path

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
