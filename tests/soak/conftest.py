"""Engines idle in a process of their own, beside other tests: these don't wait for them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

IDLE_S = float(os.environ.get("TLLM_SOAK_IDLE_S", "70"))
"""Past every default time-out of the clients; 600 in `make soak`."""
SCRIPT = Path(__file__).with_name("idle_engines.py")


class IdleEngines:
    """The process. `directory` is where its sockets are, and nothing is left once it has ended."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(
            prefix="tllm-idle-"
        )  # pytest's own paths are too long for a socket
        self.directory = Path(self._directory.name)
        self.errors = self.directory / "stderr"
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(IDLE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.directory)},
            )

    def wait(self) -> dict[str, Any]:
        """What it saw."""
        assert self._process.stdout is not None
        said = self._process.stdout.read()
        assert self._process.wait() == 0, self.errors.read_text()
        found: dict[str, Any] = json.loads(said)
        return found

    def close(self) -> None:
        """Ends it in an orderly way where it still idles."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._directory.cleanup()


STARTED = pytest.StashKey[IdleEngines]()


def _start(config: pytest.Config) -> IdleEngines:
    engines = config.stash[STARTED] = IdleEngines()
    config.add_cleanup(engines.close)
    return engines


def pytest_collection_finish(session: pytest.Session) -> None:
    # Each of several workers collects every test, and one of them will run this one: beside the others in any case.
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    wanted = any("idle_engines" in getattr(item, "fixturenames", ()) for item in session.items)
    if alone and wanted and not session.config.option.collectonly:
        _start(session.config)


@pytest.fixture
def idle_engines(request: pytest.FixtureRequest) -> IdleEngines:
    started = request.config.stash.get(STARTED, None)
    return _start(request.config) if started is None else started
