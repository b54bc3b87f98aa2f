"""The owner's own end, its script, and its key."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tllm_core.conformance.case import case
from tllm_core.conformance.launcher.subject import LauncherSuite
from tllm_core.conformance.launcher.watched import PATIENCE_S, Watched
from tllm_core.contracts.interfaces import Identity
from tllm_core.world.process import wait_gone

SCRIPT = """
import json, os, sys
told = json.loads(os.environ.pop("TOLD"))
sys.path[:] = told["path"]
print(json.dumps({"running": os.getpid()}), flush=True)
import msgspec
from tllm_core.config import convert_options
from tllm_core.contracts.interfaces import Failed, Identified, Phase, Ready, WorldSpec
from tllm_core.registry import Registry
kind = Registry().launcher(told["launcher"])
launcher = kind(convert_options(kind.settings_type, told["settings"], "settings"))
world = launcher.launch(msgspec.convert(told["spec"], WorldSpec))
kinds, wanted = {"Identified": Identified, "Phase": Phase, "Ready": Ready}, None
while wanted is None:
    for event in world.events(None):
        if isinstance(event, Identified):
            told_of = [one for one in (*event.ranks, event.watcher) if one is not None]
            print(json.dumps({"processes": [[one.rank, one.pid, one.start_time] for one in told_of]}), flush=True)
        if isinstance(event, (kinds[told["until"]], Failed)):
            wanted = event
print(json.dumps({"event": type(wanted).__name__}), flush=True)
sys.stdin.read()
print(json.dumps({"stopped": world.stop(20)}), flush=True)
"""
"""A user's script: it has no main guard, and would run again in any process that imports it."""


class OwnerCases(LauncherSuite):
    """What an owner can do without harm, and what ends with it."""

    @case("I7", timeout_s=90.0)
    def test_a_killed_owner_takes_its_world_along(self) -> None:
        """SIGKILL for the owner, while its world loads and when it is ready: no process of the world outlives it for long.

        If this fails: a crash of the caller leaves engines that hold the accelerator.
        """
        self.need_processes()
        for until, load_s in (("Phase", 600), ("Ready", 0)):
            owner = self._script(until, load_delay_s=load_s)
            assert owner.until("event") == until
            assert owner.processes
            os.kill(owner.popen.pid, signal.SIGKILL)
            assert wait_gone(owner.processes, PATIENCE_S / 2), f"processes outlive their owner: {owner.processes}"

    @case(timeout_s=60.0)
    def test_a_script_needs_no_main_guard(self) -> None:
        """A script that starts a world at its top level runs once, stops the world, and ends with code 0.

        If this fails: the user's script is imported again in the world's processes.
        """
        owner = self._script("Ready")
        assert owner.until("event") == "Ready"
        owner.close_stdin()
        assert owner.until("stopped") is True
        assert owner.popen.wait(PATIENCE_S) == 0
        assert wait_gone(owner.processes, PATIENCE_S / 2)

    @case("I9", timeout_s=60.0)
    def test_no_process_shows_the_key(self) -> None:
        """Neither the command line nor the environment of a world's process, as the system shows them, holds the key.

        If this fails: any user of the host, or whatever collects process lists, can use the engine.
        """
        self.need_processes()
        spec = self.world_spec()
        forms = {form for key in (spec.key, spec.owner) for form in (key, key.hex().encode())}
        world = Watched(self.make().launch(spec))
        self.endings.append(world.end)
        self.open.callback(world.end)
        world.ready()
        for process in world.processes:
            for name in ("cmdline", "environ"):
                shown = Path(f"/proc/{process.pid}/{name}")
                content = shown.read_bytes() if shown.exists() else b""
                assert not any(form in content for form in forms), f"the key is in {shown}"

    def _script(self, until: str, **engine: Any) -> Owner:
        told = {
            "launcher": self.reference,
            "settings": dict(self.settings),
            "spec": msgspec.to_builtins(self.world_spec(**engine)),
            "until": until,
            "path": [entry or os.getcwd() for entry in sys.path],
        }
        directory = self.open.enter_context(tempfile.TemporaryDirectory(prefix="tllm-"))
        owner = Owner(Path(directory, "user_script.py"), told)
        self.open.callback(owner.end)
        self.endings.append(owner.end)
        return owner


class Owner:
    """A user's script in a process of its own, and what it says."""

    def __init__(self, path: Path, told: dict[str, Any]) -> None:
        path.write_text(SCRIPT, encoding="utf-8")
        self.popen = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TOLD": json.dumps(told)},
        )
        self.said: dict[str, Any] = {}
        self.processes: list[Identity] = []

    def until(self, key: str) -> Any:
        """What the script says under that key; AssertionError where it ends before, or runs a second time."""
        assert self.popen.stdout is not None
        while key not in self.said:
            assert select.select([self.popen.stdout], [], [], PATIENCE_S)[0], f"silent after {self.said}"
            line = self.popen.stdout.readline()
            assert line, f"the script ended after {self.said}"
            words = json.loads(line)
            assert "running" not in words or "running" not in self.said, "the script ran twice"
            self.said.update(words)
            told = [Identity(*one) for one in words.get("processes", ())]
            self.processes += [one for one in told if one.pid != self.popen.pid]
        return self.said[key]

    def close_stdin(self) -> None:
        """Lets the script go on."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def end(self) -> None:
        """SIGKILL, and waits for its end; idempotent."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
