"""The owner's own end, its script, and its key."""

from __future__ import annotations

import contextlib
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
from tllm_core.world.process import is_alive, wait_gone

UNFINISHED_S = 0.3
"""How long an owner waits for a world that does not stop."""
SCRIPT = """
import json, os, sys, threading
told = json.loads(os.environ.pop("TOLD"))
sys.path[:] = told["path"]
def say(words):
    sys.stdout.write(json.dumps(words) + "\\n")  # whole, also where two processes have this stdout
    sys.stdout.flush()
say({"running": os.getpid()})
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
            say({"processes": [[one.rank, one.pid, one.start_time] for one in told_of]})
        if isinstance(event, (kinds[told["until"]], Failed)):
            wanted = event
say({"event": type(wanted).__name__})
sys.stdin.read()
stopped = world.stop(told["stop_s"])
say({"stopped": stopped})
if not stopped:
    threading.Event().wait()
"""
"""A user's script: it has no main guard, and would run again in any process that imports it. Where its world does not stop, it
waits for its own end."""


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

    @case("I7", timeout_s=60.0)
    def test_an_owner_killed_during_a_stop_takes_its_world_along(self) -> None:
        """SIGKILL for an owner whose `stop` has given up on a rank that stands still: no process of the world outlives it for
        long.

        If this fails: an end that the owner had asked for is waited for, and there is nobody left to insist on it.
        """
        self.need_processes()
        owner = self._script("Ready", stop_s=UNFINISHED_S)
        assert owner.until("event") == "Ready"
        os.kill(owner.processes[0].pid, signal.SIGSTOP)
        owner.close_stdin()
        assert owner.until("stopped") is False, "it says that a world that stands still is gone"
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
        assert "running" not in owner.rest(), "the script ran twice"
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

    def _script(self, until: str, *, stop_s: float = 20.0, **engine: Any) -> Owner:
        told = {
            "launcher": self.reference,
            "settings": dict(self.settings),
            "spec": msgspec.to_builtins(self.world_spec(**engine)),
            "until": until,
            "stop_s": stop_s,
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

    def rest(self) -> str:
        """What it says until nobody is left who could."""
        assert self.popen.stdout is not None
        return self.popen.stdout.read()

    def close_stdin(self) -> None:
        """Lets the script go on."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def end(self) -> None:
        """SIGKILL for it and for what it left, and waits for its end; idempotent."""
        self.popen.kill()
        self.popen.wait()
        for process in filter(is_alive, self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
