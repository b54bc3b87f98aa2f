"""Engines behind real brokers, with frontends in this process and in others, and faults of the broker and of the path to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attach.conftest import AttachedProcess, Owned
from tllm_core import GenerationExecutor
from tllm_core.config import load_settings
from tllm_core.conformance.broker import BrokerProcess, nats_server, valkey_server
from tllm_core.world.process import wait_gone

SERVERS: dict[str, Callable[..., BrokerProcess]] = {"nats": nats_server, "redis": valkey_server}
PATIENCE_S = 60.0
LONG = 100_000
"""Tokens of a stream that does not end during a test."""


def until(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_S) -> Any:
    """Waits for a condition, which must come true."""
    deadline, tick = time.monotonic() + timeout, threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true within {timeout:g} s: {what}")
        tick.wait(0.01)
    return value


class Setup:
    """One real broker, the engines behind it, and their frontends in other processes."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.server = SERVERS[name]().start()
        self.executors: list[GenerationExecutor] = []
        self.frontends: list[AttachedProcess] = []

    def own(
        self, *, url: str | None = None, settings: dict[str, Any] | None = None, **engine_options: Any
    ) -> GenerationExecutor:
        """An echo engine in processes of its own; its lane goes over `url`, the broker's own where None."""
        options = {"step_interval_s": 0.002, "max_seq_len": 2 * LONG, **engine_options}
        executor = GenerationExecutor.create(
            load_settings(
                None,
                overrides={
                    "engine.name": "echo",
                    "engine.options": options,
                    "transport.name": self.name,
                    "transport.options": {"url": url or self.server.url},
                    **(settings or {}),
                },
            )
        )
        self.executors.append(executor)
        return executor

    def shared(self, **options: Any) -> Owned:
        """An engine that others attach to."""
        executor = self.own(**options)
        return Owned(self.directory / f"engine-{len(self.executors)}.json", executor)

    def attach(self, owned: Owned, *, url: str | None = None, settings: dict[str, Any] | None = None) -> Any:
        executor = GenerationExecutor.attach(
            owned.path,
            config=load_settings(None, overrides={"transport.name": self.name, **(settings or {})}),
            transport_options={"url": url or self.server.url},
        )
        self.executors.append(executor)
        return executor

    def attach_process(self, owned: Owned, *arguments: Any) -> AttachedProcess:
        process = AttachedProcess(owned.path, *arguments)
        self.frontends.append(process)
        return process

    def close(self) -> None:
        for process in self.frontends:
            if process.popen.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
        for executor in reversed(self.executors):
            executor.shutdown(5.0)
            if executor._ticket is not None:
                assert wait_gone(executor._frontend.ranks, 5.0)
        self.server.stop()


@pytest.fixture(params=sorted(SERVERS))
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(request.param, tmp_path)
    try:
        yield setup
    finally:
        setup.close()
