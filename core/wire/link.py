"""Pumps sessions over ports: the only place where they meet each other, the clock and threads."""

import time
from collections import Counter
from collections.abc import Callable, Collection

from tllm_core.contracts.interfaces import EngineAddress, EnginePort, FrontendPort, PeerId
from tllm_core.contracts.messages import DownMessage, EngineInfo, UpMessage, Welcome
from tllm_core.wire.liveness import DEFAULT_LIVENESS, LivenessSettings
from tllm_core.wire.settings import DEFAULT_WIRE, WireSettings


class FrontendLink:
    """A frontend's end of one session. `send`, `wake` and `close` from any thread; `open` and `receive` from one."""

    counters: Counter[str]

    def __init__(
        self,
        port: FrontendPort,
        address: EngineAddress,
        *,
        peer: PeerId,
        key: bytes,
        owner: bytes = b"",
        by_reference: bool = False,
        reliable: bool = True,
        settings: WireSettings = DEFAULT_WIRE,
        liveness: LivenessSettings = DEFAULT_LIVENESS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def open(self, timeout: float) -> Welcome:
        raise NotImplementedError

    def send(self, message: UpMessage) -> None:
        raise NotImplementedError

    def receive(self, timeout: float | None) -> list[DownMessage]:
        raise NotImplementedError

    def idle(self) -> bool:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class EngineLink:
    """An engine's end of all its sessions. `receive` and `close` from one thread; `send` and `broadcast` also from a second."""

    counters: Counter[str]

    def __init__(
        self,
        port: EnginePort,
        *,
        key: bytes,
        owner: bytes = b"",
        info: EngineInfo,
        by_reference: bool = False,
        reliable: bool = True,
        settings: WireSettings = DEFAULT_WIRE,
        liveness: LivenessSettings = DEFAULT_LIVENESS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    @property
    def sessions(self) -> Collection[int]:
        raise NotImplementedError

    def receive(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        raise NotImplementedError

    def send(self, session: int, message: DownMessage) -> bool:
        raise NotImplementedError

    def broadcast(self, message: DownMessage) -> None:
        raise NotImplementedError

    def end(self, session: int, reason: str) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def close(self, flush_s: float = 1.0) -> None:
        raise NotImplementedError
