"""Ports of ours with one method replaced."""

from __future__ import annotations

from typing import Any

from tllm_core.contracts.interfaces import EngineAddress, EnginePort, FrontendPort, PeerId
from tllm_core.transports.inproc import Inbox


class Altered:
    """Mixed into a transport of ours: what it opens is given to `alter` first, which breaks a method of it.

    inbox: the class of inproc's queues instead.
    """

    inbox: type[Inbox] | None = None

    def listen(self, engine: str, generation: int) -> EnginePort:
        port = super().listen(engine, generation)
        self.alter(port)
        self.alter_engine(port)
        return port

    def connect(self, engine: EngineAddress, peer: PeerId) -> FrontendPort:
        port = super().connect(engine, peer)
        self.alter(port)
        self.alter_frontend(port)
        return port

    def alter(self, port: Any) -> None:
        if self.inbox is not None:
            port._inbox.__class__ = self.inbox

    def alter_engine(self, port: Any) -> None: ...

    def alter_frontend(self, port: Any) -> None: ...
