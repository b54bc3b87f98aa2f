import os
import secrets
import textwrap
import time
from collections import deque

import pytest

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, Identified, Ready, WorldSpec
from tllm_core.world.launch import SpawnLauncher, SpawnSettings
from tllm_core.world.process import wait_gone

TRANSPORT = "zmq"


class Watched:
    """A world and all that it has said so far."""

    def __init__(self, world):
        self.world = world
        self.seen = []
        self.beats = []
        self.unread = deque()

    def until(self, kind, timeout=30.0, when=lambda event: True):
        """The next event of that kind; those before it are passed over."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            while self.unread:
                event = self.unread.popleft()
                (self.beats if isinstance(event, Beaten) else self.seen).append(event)
                if isinstance(event, kind) and when(event):
                    return event
                assert not isinstance(event, Exited), self.seen
            self.unread.extend(self.world.events(left))
        raise AssertionError(f"no {kind} within {timeout} s after {self.seen}")

    def ready(self):
        event = self.until(Ready | Failed)
        assert isinstance(event, Ready), event
        return self.identified()

    def identified(self):
        return next(event for event in self.seen if isinstance(event, Identified))

    def processes(self):
        identified = self.identified()
        return (*identified.ranks, identified.watcher)

    def of(self, kind):
        return [event for event in self.seen if isinstance(event, kind)]


def world_spec(engine="echo", liveness=None, **engine_options):
    return WorldSpec(
        engine=engine,
        engine_options=engine_options,
        engine_name=f"engine-{secrets.token_hex(4)}",
        transport=TRANSPORT,
        liveness=liveness or {},
        key=b"k" * 32,
        owner=b"o" * 16,
        generation=secrets.randbits(63),
    )


@pytest.fixture
def transport():
    return TRANSPORT


@pytest.fixture
def spawn():
    """Starts worlds; afterwards every process of theirs is gone."""
    worlds = []

    def launch(engine="echo", *, settings=None, **engine_options):
        watched = Watched(SpawnLauncher(SpawnSettings(**(settings or {}))).launch(world_spec(engine, **engine_options)))
        worlds.append(watched)
        return watched

    yield launch
    for watched in worlds:
        watched.world.kill()
        if watched.of(Identified):
            assert wait_gone(watched.processes(), 0)
        if not watched.of(Exited):
            watched.until(Exited)


@pytest.fixture
def engine_module(tmp_path, monkeypatch):
    """Writes a module with an engine that no entry point names; it is found by the owner's sys.path alone."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(body, imports=""):
        name = f"third_party_{os.urandom(4).hex()}"
        (tmp_path / f"{name}_spec.py").write_text(
            textwrap.dedent(f"""
            from msgspec import Struct
            from tllm_core.contracts.interfaces import EngineSpec

            class Settings(Struct):
                path: str = ""

            SPEC = EngineSpec(name="third", settings_type=Settings, load="{name}:ThirdEngine")
            """)
        )
        header = textwrap.dedent(f"""
            {imports}
            import os, subprocess, sys, time
            from tllm_core.contracts.interfaces import Engine
            from tllm_core.contracts.messages import EngineInfo, Step

            class ThirdEngine(Engine):
                def submit(self, request): pass
                def abort(self, request_id): pass
                def step(self): return Step((), False)
            """)
        (tmp_path / f"{name}.py").write_text(header + textwrap.indent(textwrap.dedent(body), "    "))
        return f"{name}_spec:SPEC"

    return write
