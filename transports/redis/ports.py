"""Both ends of a redis lane. Each has a thread that writes and one that reads, with a connection each."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tllm_core.contracts.interfaces import EngineAddress, EnginePort, Frame, FrontendPort, PeerId, Port, PortState
from tllm_core.errors import PortClosed, PortDown
from tllm_core.transports.redis.claim import Claim
from tllm_core.transports.redis.connection import Command, Connection, Dialer, done
from tllm_core.transports.redis.entries import END, HERE, START, frame_of
from tllm_core.transports.redis.inbox import Inbox
from tllm_core.transports.redis.keys import PEER, Keys
from tllm_core.transports.redis.outgoing import Stream
from tllm_core.transports.redis.path import ENGINE, Path
from tllm_core.transports.redis.reader import Reader
from tllm_core.transports.redis.settings import RedisSettings
from tllm_core.transports.redis.writer import Writer

_open_ports: weakref.WeakSet[_StreamPort] = weakref.WeakSet()


def _disown_all() -> None:
    for port in list(_open_ports):
        port.disown()


os.register_at_fork(after_in_child=_disown_all)


class _StreamPort(Port):
    """The half that both ends share."""

    def __init__(self, settings: RedisSettings, dialer: Dialer, keys: Keys) -> None:
        self.max_frame: int | None = settings.max_frame_bytes
        self._settings, self._keys, self._dialer = settings, keys, dialer
        self._inbox = Inbox(settings.queue_frames, settings.queue_bytes)
        self._path = Path(self._inbox.wake)
        self._closed_at: float | None = None
        self._closing = threading.Lock()
        self._writer = Writer(
            settings,
            dialer.dial,
            self._path,
            probe=("XADD", keys.nowhere, "NOMKSTREAM", "*", HERE, b""),
            greet=self._greet,
            beat=self._beat,
            farewell=self._farewell,
        )
        self._reader = Reader(
            settings,
            dialer.dial,
            self._path,
            positions=self._positions,
            arrived=self._arrived,
            wait=self._inbox.wait_for_room,
            lost=self._writer.prove,
        )

    def _start(self, connection: Connection) -> None:
        """With the connection that will write. Raises one of LOST."""
        self._reader.start(self._dialer.dial(self._settings.block_s))
        try:
            self._writer.start(connection)
        except BaseException:
            self._reader.close()
            raise
        _open_ports.add(self)

    @property
    def state(self) -> PortState:
        if self._closed_at is None:
            return self._path.state
        return PortState(False, "closed", self._closed_at, closed=True)

    def path_ok_at(self) -> float:
        return self._path.ok_at()

    def receive(self, timeout: float | None) -> list[Frame]:
        self._check_open()
        return self._inbox.take(timeout)

    def wake(self) -> None:
        if self._closed_at is None:
            self._inbox.wake()

    def close(self) -> None:
        with self._closing:
            if self._closed_at is not None:
                return
            self._closed_at = time.monotonic()
            self._inbox.close()
            self._writer.close(self._settings.linger_s)
            self._reader.close()
            _open_ports.discard(self)

    def disown(self) -> None:
        """In a forked child: the port is the parent's, and this copy of it only says so."""
        self._closed_at = time.monotonic()
        self._closing = threading.Lock()
        self._inbox.disown()
        self._writer.disown()
        self._reader.disown()

    def _check_open(self) -> None:
        if self._closed_at is not None:
            raise PortClosed("this redis port was closed")

    def _deliver(self, key: bytes, entries: Sequence[Any]) -> None:
        """Hands frames over, and has their entries removed."""
        frames: list[Frame] = []
        size = 0
        for _, fields in entries:
            if (frame := frame_of(fields)) is not None:
                frames.append(frame)
                size += sum(map(len, frame))
        if frames:
            self._inbox.put(frames, size)
        self._writer.trim(key, entries[-1][0], len(entries))

    @abstractmethod
    def _greet(self, connection: Connection) -> float:
        """On each new connection that writes; returns as `_beat` does."""

    @abstractmethod
    def _beat(self, connection: Connection) -> float:
        """Keeps keys alive; returns in how many seconds it wants to be called again."""

    @abstractmethod
    def _farewell(self, connection: Connection) -> None:
        """Behind the last frame."""

    @abstractmethod
    def _positions(self) -> Sequence[tuple[bytes, bytes]]:
        """What is read: streams, each with the last id seen."""

    @abstractmethod
    def _arrived(self, key: bytes, entries: list[Any]) -> list[Command]:
        """Takes entries; returns commands to run at once."""


class _Peer:
    """What an engine keeps of a frontend. `life` differs for each port that used the same id."""

    __slots__ = ("down", "life", "position", "seen_at", "up")

    def __init__(self, keys: Keys, peer: PeerId, life: bytes) -> None:
        self.up, self.down = keys.up(peer), Stream(keys.down(peer))
        self.life = life
        self.position = START
        self.seen_at = time.monotonic()


class RedisEnginePort(_StreamPort, EnginePort):
    """The engine's end. Frontends announce themselves in its hello stream, each with streams of its own."""

    def __init__(self, settings: RedisSettings, dialer: Dialer, keys: Keys, claim: Claim) -> None:
        super().__init__(settings, dialer, keys)
        self._claim = claim
        self._peers: dict[PeerId, _Peer] = {}
        self._by_up: dict[bytes, PeerId] = {}
        self.address = EngineAddress(
            transport="redis",
            engine=keys.engine,
            generation=keys.generation,
            endpoints={"redis": dialer.where, "prefix": keys.prefix},
        )

    def open(self, connection: Connection) -> None:
        """Starts on this connection. Raises one of LOST."""
        self._start(connection)

    def send(self, to: PeerId, frame: Frame) -> None:
        self._check_open()
        peer = self._peers.get(to)
        if peer is None:
            raise PortDown(f"no frontend {to.hex()} is there")
        self._writer.put(peer.down, frame)

    # ------------------------------------------------------------------------------------------ the writer's thread

    def _greet(self, connection: Connection) -> float:
        now, ttl_ms = time.monotonic(), self._settings.ttl_ms
        for peer in list(self._peers.values()):
            peer.seen_at = now
        hello = self._keys.hello
        done(connection.run([("XADD", hello, "*", HERE, b""), ("PEXPIRE", hello, ttl_ms)]))
        self._claim.renew(connection)
        return self._settings.beat_s

    def _beat(self, connection: Connection) -> float:
        ttl_ms = self._settings.ttl_ms
        peers = list(self._peers.items())
        commands: list[Command] = [("PEXPIRE", self._keys.hello, ttl_ms)]
        for _, peer in peers:
            commands += [("EXISTS", peer.up), ("PEXPIRE", peer.down.key, ttl_ms)]
        is_there, *replies = done(connection.run(commands))
        for (peer_id, peer), up, down in zip(peers, replies[::2], replies[1::2], strict=True):
            if peer.down.made and not down:
                peer.down.made = False
                self._path.disturbed()
            if up:
                peer.seen_at = time.monotonic()
            elif time.monotonic() - peer.seen_at > self._settings.ttl_s:
                self._drop(peer_id)
        if not is_there:
            self._greet(connection)
            self._path.disturbed()
        else:
            self._claim.renew(connection)
        return self._settings.beat_s

    def _farewell(self, connection: Connection) -> None:
        """The name is free afterwards, also where somebody put something else in place of a stream."""
        try:
            self._part(connection)
        finally:
            self._claim.release(connection)

    def _part(self, connection: Connection) -> None:
        """Says END to who is there, and removes what those left who have gone. Whoever comes later finds no hello stream."""
        hello = self._keys.hello
        replies = connection.transact(("XRANGE", hello, "-", "+"), ("DEL", hello))
        for _, fields in replies[0] if replies else ():
            self._meet_announced(fields)
        peers = list(self._peers.values())
        lasts = connection.run([("XREVRANGE", peer.up, "+", "-", "COUNT", 1) for peer in peers]) if peers else []
        commands: list[Command] = []
        for peer, last in zip(peers, done(lasts), strict=True):
            left = bool(last) and last[0][1][0] == END
            if left:
                commands.append(("DEL", peer.up, peer.down.key))
                continue
            end = ("XADD", peer.down.key, self._writer.ids.next(), END, b"")
            commands += [end, ("PEXPIRE", peer.down.key, self._settings.ttl_ms), ("DEL", peer.up)]
        if commands:
            connection.run(commands)

    # ------------------------------------------------------------------------------------------ the reader's thread

    def _positions(self) -> list[tuple[bytes, bytes]]:
        peers = list(self._peers.values())
        # What was taken from the hello stream is deleted from it, so that no clock of a server can hide an announcement.
        return [(self._keys.hello, START), *((peer.up, peer.position) for peer in peers)]

    def _arrived(self, key: bytes, entries: list[Any]) -> list[Command]:
        if key == self._keys.hello:
            for _, fields in entries:
                self._meet_announced(fields)
            return [("XDEL", key, *(entry_id for entry_id, _ in entries))]
        peer_id = self._by_up.get(key)
        peer = None if peer_id is None else self._peers.get(peer_id)
        if peer_id is None or peer is None:
            return []
        peer.position = entries[-1][0]
        self._deliver(key, entries)
        if entries[-1][1][0] == END:
            self._drop(peer_id)
        return []

    def _meet_announced(self, fields: Sequence[bytes]) -> None:
        if len(fields) != 4 or fields[0] != HERE or not PEER.fullmatch(fields[1]):
            return
        peer_id, life = bytes.fromhex(fields[1].decode()), fields[3]
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = _Peer(self._keys, peer_id, life)
            self._by_up[peer.up] = peer_id
        if peer.life != life:
            peer.life, peer.position = life, START
        peer.seen_at = time.monotonic()

    def _drop(self, peer_id: PeerId) -> None:
        """A frontend that left, or whose keys have expired."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        self._writer.forget(peer.down)
        # Before it is forgotten here: a farewell that begins meanwhile either finds the peer or this.
        self._writer.later(("DEL", peer.up, peer.down.key))
        self._peers.pop(peer_id, None)
        self._by_up.pop(peer.up, None)


class RedisFrontendPort(_StreamPort, FrontendPort):
    """A frontend's end. It is up while it has its connections and the engine has its hello stream at the same server."""

    def __init__(self, settings: RedisSettings, dialer: Dialer, keys: Keys, peer: PeerId) -> None:
        super().__init__(settings, dialer, keys)
        self._name = peer.hex().encode()
        self._life = secrets.token_hex(8).encode()
        self._up = Stream(keys.up(peer))
        self._down = keys.down(peer)
        self._position = START

    def open(self) -> None:
        """Connects. Raises one of LOST."""
        connection = self._dialer.dial_patiently()
        try:
            self._start(connection)
        except BaseException:
            connection.close()
            raise

    def send(self, frame: Frame) -> None:
        self._check_open()
        self._writer.put(self._up, frame)

    # ------------------------------------------------------------------------------------------ the writer's thread

    def _greet(self, connection: Connection) -> float:
        if not self._announce(connection):
            return self._settings.reconnect_s
        up = self._up
        first = ("XADD", up.key, self._writer.ids.next(), HERE, b"")
        done(connection.run([first, ("PEXPIRE", up.key, self._settings.ttl_ms)]))
        up.made = True
        self._path.back(ENGINE)
        return self._settings.beat_s

    def _announce(self, connection: Connection) -> bool:
        """False where the engine is not at this server."""
        hello = ("XADD", self._keys.hello, "NOMKSTREAM", "*", HERE, self._name, b"life", self._life)
        if connection.call(*hello) is not None:
            return True
        self._path.lost(ENGINE, f"engine {self._keys.engine!r} is not at the redis server {self._dialer.where}")
        return False

    def _beat(self, connection: Connection) -> float:
        ttl_ms = self._settings.ttl_ms
        renewals = [("PEXPIRE", self._up.key, ttl_ms), ("PEXPIRE", self._down, ttl_ms)]
        is_there, _ = done(connection.run(renewals))
        if is_there and not self._path.is_missing(ENGINE) and self._announce(connection):
            return self._settings.beat_s
        wait_s = self._greet(connection)
        if not is_there:
            self._path.disturbed()
        return wait_s

    def _farewell(self, connection: Connection) -> None:
        """Leaves the last entry to the engine, which removes both streams; without an engine they go at once."""
        end = ("XADD", self._up.key, "NOMKSTREAM", self._writer.ids.next(), END, b"")
        replies = connection.transact(("EXISTS", self._keys.hello), end)
        if replies and not replies[0]:
            connection.call("DEL", self._up.key, self._down)

    # ------------------------------------------------------------------------------------------ the reader's thread

    def _positions(self) -> list[tuple[bytes, bytes]]:
        return [(self._down, self._position)]

    def _arrived(self, key: bytes, entries: list[Any]) -> list[Command]:
        self._position = entries[-1][0]
        self._deliver(key, entries)
        if entries[-1][1][0] == END:
            self._path.lost(ENGINE, f"engine {self._keys.engine!r} has closed its end")
            self._writer.hurry()
        return []
