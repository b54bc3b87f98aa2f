"""One end of a lane in a process of its own: `python -m tllm_core.conformance.child`, told by JSON on stdin.

A frontend says hello and then sends back what it gets; an engine says its address and answers whom a frame names.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from tllm_core.config import convert_options
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.errors import PortError
from tllm_core.registry import Registry

STARTS_S = 40.0


class ChildEnd:
    """The parent's view of it; a context manager."""

    def __init__(self, role: str, transport: str, options: Mapping[str, Any], address: EngineAddress | None) -> None:
        self.peer = b"\x01" + secrets.token_bytes(15)
        words = {
            "role": role,
            "transport": transport,
            "options": dict(options),
            "address": None if address is None else msgspec.to_builtins(address),
            "peer": self.peer.hex(),
            "path": sys.path,
        }
        start = f"import json, sys; told = json.loads({json.dumps(json.dumps(words))}); sys.path[:] = told['path']; "
        run = "from tllm_core.conformance.child import main; main(told)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start + run], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self.address = self._said()
        except BaseException:
            self.kill()
            raise

    def _said(self) -> EngineAddress:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], STARTS_S)[0], "the child's end does not start"
        line = self._process.stdout.readline()
        assert line, "the child's end could not be opened"
        return msgspec.json.decode(line, type=EngineAddress)

    def kill(self) -> None:
        """SIGKILL, and waits for its end; idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> ChildEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main(told: dict[str, Any]) -> None:
    """Runs until its stdin is closed, or somebody kills it."""
    kind = Registry().transport(told["transport"])
    transport = kind(convert_options(kind.settings_type, told["options"], "settings"))
    peer = bytes.fromhex(told["peer"])
    if told["role"] == "engine":
        engine = transport.listen(f"child-{peer.hex()}", secrets.randbits(64))
        _say(engine.address)
        while _is_wanted():
            for frame in engine.receive(0.05):
                with contextlib.suppress(PortError):
                    engine.send(bytes(frame[0]), frame)
        engine.close()
        return
    address = msgspec.convert(told["address"], EngineAddress)
    frontend = transport.connect(address, peer)
    frontend.send([b"hello from a child"])
    _say(address)
    while _is_wanted():
        for frame in frontend.receive(0.05):
            frontend.send([bytes(part) for part in frame])
    frontend.close()


def _say(address: EngineAddress) -> None:
    sys.stdout.write(msgspec.json.encode(address).decode() + "\n")
    sys.stdout.flush()


def _is_wanted() -> bool:
    return not select.select([sys.stdin], [], [], 0)[0]
