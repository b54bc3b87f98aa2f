"""Both ends of a lane over NATS: what each subscribes to, and how they find each other."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Sequence

import nats.errors
from nats.aio.msg import Msg

from tllm_core.contracts.interfaces import EngineAddress, EnginePort, Frame, FrontendPort, PeerId
from tllm_core.errors import PortDown
from tllm_core.transports.nats.client import Connection, Lost
from tllm_core.transports.nats.connected import ConnectedPort
from tllm_core.transports.nats.settings import NatsSettings
from tllm_core.transports.nats.subjects import Subjects

ANSWER_S = 0.5
"""How long somebody who is subscribed may take to answer."""
CLAIM_S = 0.1
"""How long others may take to object to a claim of a name that was free."""
NOBODY = bytes(16)
"""No peer: a peer's first byte is not 0."""

ASK = b""
"""On an engine's subject, with a reply subject: is anybody there?"""
PEER = re.compile("[0-9a-f]{32}")
LEFT = b"\xff"
"""The last of a frontend. Neither of the two is a packed frame."""


class NatsEnginePort(ConnectedPort, EnginePort):
    """The engine's end. It knows a frontend once it has heard from it, until the frontend leaves or is forgotten."""

    def __init__(self, settings: NatsSettings, urls: Sequence[str], subjects: Subjects, address: EngineAddress) -> None:
        super().__init__(settings, urls, subjects)
        self.address = address
        self._peers: dict[PeerId, str] = {}
        self._claim = secrets.token_bytes(16)
        self._holds = self._outbid = False

    def send(self, to: PeerId, frame: Frame) -> None:
        subject = self._peers.get(to)
        if subject is None:
            self._check_open()
            raise PortDown(f"no frontend {to.hex()} is known")
        self._send(subject, frame)

    def forget(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)

    async def _enter(self, connection: Connection) -> None:
        if not self._holds:
            await self._check_free(connection)
        await connection.subscribe(self._subjects.holder, self._on_claim)
        if not self._holds:
            await self._take_name(connection)
        await connection.subscribe(self._subjects.up_from_all, self._on_up)
        # A server tells of what this login may not do afterwards, so that is tried before the port is up.
        await connection.client.publish(self._subjects.down(NOBODY), ASK)
        await connection.echo()

    async def _check_free(self, connection: Connection) -> None:
        """An answer is a holder's. Silence is none: whoever listens to all subjects of a server is no holder."""
        with contextlib.suppress(nats.errors.NoRespondersError, nats.errors.TimeoutError):
            await connection.client.request(self._subjects.holder, self._claim, timeout=ANSWER_S)
            raise self._is_held(connection)

    async def _take_name(self, connection: Connection) -> None:
        """Of several that claim the name at the same time, the lowest claim gets it; the others are told or see that claim."""
        with contextlib.suppress(nats.errors.TimeoutError):
            await connection.client.request(self._subjects.holder, self._claim, timeout=CLAIM_S)
            self._outbid = True
        if self._outbid:
            raise self._is_held(connection)
        self._holds = True

    def _is_held(self, connection: Connection) -> Lost:
        name = self._subjects.engine
        return Lost(
            f"an engine named {name!r} is already running at {connection.url} (prefix {self._subjects.prefix}); "
            "stop it or choose another engine name",
            hopeless=True,
        )

    async def _on_claim(self, message: Msg) -> None:
        if message.data == self._claim:
            return
        if self._holds or self._claim < message.data:
            await _answer(message)
        else:
            self._outbid = True

    async def _on_up(self, message: Msg) -> None:
        block = message.data
        if block == ASK:
            await _answer(message)
            return
        peer = _peer_of(message.subject)
        if peer is None:
            return
        if block == LEFT:
            self._peers.pop(peer, None)
            return
        if peer not in self._peers:
            self._peers[peer] = self._subjects.down(peer)
        self._inbox.put(block)


class NatsFrontendPort(ConnectedPort, FrontendPort):
    """A frontend's end. It is down until an engine of that generation listens."""

    def __init__(self, settings: NatsSettings, urls: Sequence[str], subjects: Subjects, peer: PeerId) -> None:
        super().__init__(settings, urls, subjects)
        self._up, self._down = subjects.up(peer), subjects.down(peer)

    def send(self, frame: Frame) -> None:
        self._send(self._up, frame)

    async def _enter(self, connection: Connection) -> None:
        await connection.subscribe(self._down, self._on_down)
        pause = self._settings.reconnect_s
        while not await self._is_engine_there(connection):
            self._say_down(f"no engine listens on {self._up.rpartition('.up.')[0]} at {connection.url}")
            self._opened.set()
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._settings.reconnect_max_s)

    async def _is_engine_there(self, connection: Connection) -> bool:
        """Somebody who listens and doesn't answer in time is taken for an engine that is busy."""
        try:
            await connection.client.request(self._up, ASK, timeout=ANSWER_S)
        except nats.errors.NoRespondersError:
            return False
        except nats.errors.TimeoutError:
            return True
        return True

    async def _leave(self, connection: Connection) -> None:
        await connection.client.publish(self._up, LEFT)

    async def _on_down(self, message: Msg) -> None:
        self._inbox.put(message.data)


async def _answer(message: Msg) -> None:
    with contextlib.suppress(nats.errors.BadSubjectError):
        if message.reply:
            await message.respond(ASK)


def _peer_of(subject: str) -> PeerId | None:
    """None where a stranger made the subject up."""
    token = subject.rpartition(".")[2]
    return bytes.fromhex(token) if PEER.fullmatch(token) else None
