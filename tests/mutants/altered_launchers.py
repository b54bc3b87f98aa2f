"""Launchers of ours, to be broken in one place, and such that start another watcher."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tllm_core.world import spawn
from tllm_core.world.launch import SpawnLauncher

ROOT = str(Path(__file__).resolve().parents[2])


class Altered:
    """Mixed into a launcher of ours: `change` is given each event of its worlds, and `alter` each world."""

    def launch(self, spec):
        world = super().launch(spec)
        events = world.events
        world.events = lambda timeout: [changed for event in events(timeout) for changed in self.change(event)]
        self.alter(world)
        return world

    def change(self, event: Any) -> list[Any]:
        return [event]

    def alter(self, world: Any) -> None: ...


class UnderAnotherWatcher(SpawnLauncher):
    """Starts the class of `watchers.py` that `watcher` names."""

    watcher: str

    def launch(self, spec):
        start, spawn._start_watcher = spawn._start_watcher, self._start
        try:
            return super().launch(spec)
        finally:
            spawn._start_watcher = start

    def _start(self, python, sock):
        code = (
            f"import sys; sys.path.insert(0, {ROOT!r}); from tests.mutants.watchers import main; main({self.watcher!r})"
        )
        return subprocess.Popen(
            [python, "-P", "-c", code, "watcher", str(sock.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[sock.fileno()],
            start_new_session=True,
        )
