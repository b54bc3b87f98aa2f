"""Faults as parts: an engine world that can be killed, frozen and left, a reader that stops, a peer that speaks garbage."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from tllm_core.attach import AttachFile, write_attach_file
from tllm_core.config import Settings, load_settings
from tllm_core.conformance.proxy import CutProxy
from tllm_core.contracts.interfaces import EngineAddress, Frame, FrontendPort, Identity, Transport
from tllm_core.contracts.messages import GenerationRequest, SamplingParams, Submit, TokenIds
from tllm_core.errors import PortError
from tllm_core.executor import GenerationExecutor
from tllm_core.frontend import Frontend
from tllm_core.plan import Plan
from tllm_core.wire.link import FrontendLink
from tllm_core.world.process import is_alive, wait_gone

ELSEWHERE = "another host"
"""In an attach file: its processes can't be looked at, so that only the lanes tell of them."""
HOST_AND_PORT = re.compile(r"127\.0\.0\.1:(\d+)")
GONE_S = 10.0


class _Plan(Plan):
    """Remembers what an owner knows of its world."""

    address: EngineAddress
    key: bytes

    def connect(self, address: EngineAddress, spec: Any, settings: Settings) -> FrontendLink:
        self.address, self.key = address, spec.key
        return super().connect(address, spec, settings)


class EngineProcess:
    """An engine world, its owner here and more frontends; a context manager, whose end leaves none of its processes.

    settings: as `load_settings` makes them. With a launcher that starts processes, rank 0 can be killed, frozen and thawed.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plan = cast("_Plan", _Plan.of(settings))
        self._frontends: list[GenerationExecutor] = []
        self.owner = GenerationExecutor._start(self._plan, settings, None)
        self._ticket = self.owner._ticket

    @property
    def transport(self) -> Transport:
        return self._plan.transport

    @property
    def address(self) -> EngineAddress:
        return self._plan.address

    @property
    def processes(self) -> tuple[Identity, ...]:
        """Rank 0 first, the watcher last; none where the engine is in this process."""
        own = tuple(rank for rank in self.owner._frontend.ranks if rank.pid != os.getpid())
        watcher = None if self._ticket is None else self._ticket.watcher
        return own if watcher is None or not own else (*own, watcher)

    def kill(self) -> None:
        """SIGKILL for rank 0."""
        os.kill(self.processes[0].pid, signal.SIGKILL)

    def freeze(self, *, whole: bool = False) -> None:
        """SIGSTOP for rank 0, or for the whole world, its watcher first."""
        for process in reversed(self.processes) if whole else self.processes[:1]:
            os.kill(process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets all of it go on; does nothing for processes that are gone."""
        for process in self.processes:
            if is_alive(process):
                os.kill(process.pid, signal.SIGCONT)

    def end(self) -> None:
        """SIGKILL for every process of it."""
        for process in self.processes:
            if is_alive(process):
                os.kill(process.pid, signal.SIGKILL)

    def attach(
        self, *, options: Mapping[str, Any] | None = None, through: Detour | None = None, **overrides: Any
    ) -> GenerationExecutor:
        """One more frontend, in this process. It sees the world's processes only by its lanes.

        options: of the transport, where they are not the owner's. through: the way that its lanes go.
        """
        ticket = self._ticket
        executor = self._joined() if ticket is None else self._attached(ticket, options, through, overrides)
        self._frontends.append(executor)
        return executor

    def _attached(
        self, ticket: AttachFile, options: Mapping[str, Any] | None, through: Detour | None, overrides: dict[str, Any]
    ) -> GenerationExecutor:
        turn = (lambda address: address) if through is None else through.turn
        watcher = None if ticket.watcher_address is None else turn(ticket.watcher_address)
        content = structs.replace(ticket, address=turn(ticket.address), watcher_address=watcher, host=ELSEWHERE)
        transport = self.settings.transport
        config = load_settings(None, overrides={"transport.name": transport.name, **overrides})
        with tempfile.TemporaryDirectory(prefix="tllm-") as directory:
            path = Path(directory, "engine.json")
            write_attach_file(path, content)
            return GenerationExecutor.attach(
                path, config=config, transport_options=dict(transport.options if options is None else options)
            )

    def _joined(self) -> GenerationExecutor:
        link = self.link()
        welcome = self._plan.open(link, 30.0)
        frontend = Frontend(link, welcome.frontend_id)
        return GenerationExecutor(frontend, welcome.info, self.settings, self._plan)

    def link(self, *, key: bytes | None = None) -> FrontendLink:
        """A lane that is not open yet, for whoever does with it what no executor would. Its caller closes it."""
        plan, settings = self._plan, self.settings
        return plan._link(plan.address, plan.key if key is None else key, b"", settings.wire, settings.liveness)[0]

    def close(self) -> None:
        """Ends frontends and world, also one that is frozen; waits until its processes are gone."""
        processes = self.processes
        self.thaw()
        for executor in (*reversed(self._frontends), self.owner):
            executor.shutdown(5.0)
        if not wait_gone(processes, GONE_S):
            self.end()
            raise AssertionError(f"processes of the engine world outlived its shutdown: {processes}")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Detour:
    """Leads addresses of this host through a CutProxy per port; a context manager."""

    def __init__(self) -> None:
        self.proxies: dict[int, CutProxy] = {}

    def turn(self, address: EngineAddress) -> EngineAddress:
        """The same engine, behind proxies."""
        endpoints = {name: self.turn_text(text) for name, text in address.endpoints.items()}
        return structs.replace(address, endpoints=endpoints)

    def turn_text(self, text: str) -> str:
        """The text, with each 127.0.0.1:port in it led through a proxy."""
        return HOST_AND_PORT.sub(lambda found: f"127.0.0.1:{self._proxy(int(found[1])).port}", text)

    def cut(self) -> None:
        """As CutProxy's, for all of them."""
        for proxy in self.proxies.values():
            proxy.cut()

    def heal(self) -> None:
        """As CutProxy's, for all of them."""
        for proxy in self.proxies.values():
            proxy.heal()

    @property
    def moved(self) -> int:
        """Bytes, over all of them and in both directions."""
        return sum(proxy.moved for proxy in self.proxies.values())

    def _proxy(self, port: int) -> CutProxy:
        if port not in self.proxies:
            self.proxies[port] = CutProxy("127.0.0.1", port)
        return self.proxies[port]

    def __enter__(self) -> Detour:
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self.proxies.values():
            proxy.close()


@contextlib.contextmanager
def slow_reader(world: EngineProcess, max_tokens: int) -> Iterator[FrontendLink]:
    """A frontend that asks for a long stream, and then reads nothing any more."""
    link = world.link()
    try:
        welcome = link.open(30.0)
        request = GenerationRequest(
            prompt_token_ids=TokenIds.of([7, 7]), sampling=SamplingParams(max_tokens=max_tokens)
        )
        link.send(Submit(welcome.frontend_id << 48 | 1, request))
        link.receive(1.0)
        yield link
    finally:
        link.close()


class HostilePeer:
    """A peer of the transport itself that has no key and says what it likes. Raises nothing for what isn't taken."""

    def __init__(self, transport: Transport, address: EngineAddress) -> None:
        self.port: FrontendPort = transport.connect(address, b"\x01" + secrets.token_bytes(15))
        self.sent = 0

    def say(self, frames: Sequence[Frame]) -> None:
        """Sends what the port takes."""
        for frame in frames:
            with contextlib.suppress(PortError):
                self.port.send(frame)
                self.sent += 1

    def garbage(self, like: Sequence[Frame] = ()) -> None:
        """Noise of many sizes, heads that are cut, and frames such as these with one bit or byte that is another."""
        self.say([[], [b""], [b"TLLM"], [secrets.token_bytes(72)], [b"x" * 72, b"y" * 100_000], [b""] * 2000])
        self.say([[secrets.token_bytes(size)] * 3 for size in (1, 15, 16, 40, 71, 73, 4096)])
        for frame in like:
            self.say([spoil(frame) for spoil in SPOILS])

    def close(self) -> None:
        self.port.close()


def _other_byte(frame: Frame, at: int) -> Frame:
    head = bytearray(bytes(frame[0]))
    head[at % len(head)] ^= 0x5A
    return [bytes(head), *frame[1:]]


SPOILS: tuple[Callable[[Frame], Frame], ...] = (
    lambda frame: _other_byte(frame, 8),
    lambda frame: _other_byte(frame, 16),
    lambda frame: _other_byte(frame, 24),
    lambda frame: _other_byte(frame, -1),
    lambda frame: [bytes(frame[0])[:-1], *frame[1:]],
    lambda frame: [*frame, b"more"],
    lambda frame: [frame[0]],
)
"""What makes a genuine frame a forged one."""
