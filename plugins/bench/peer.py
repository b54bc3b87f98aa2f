"""The other end of a raw measurement, as a process: `peer MODULE FUNCTION`, with the function's keywords as JSON on its stdin.

Keywords travel there because a broker's password may be among them. The peer says "ready" before it sends or answers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator

from tllm_core.contracts.messages import Plain
from tllm_core.errors import TransportError

ROUND_TRIPS = 1000
ROUND_TRIP_BYTES = 100
PATIENCE_S = 30.0
"""How long the other end may take to start, to answer and to end."""


@contextlib.contextmanager
def peer(module: str, function: str, **keywords: Plain) -> Iterator[None]:
    """Runs it beside the context, from its "ready" on. Raises TransportError where it ends before."""
    command = [sys.executable, "-m", __name__, module, function]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(keywords).encode())
            process.stdin.close()
            if process.stdout.readline() != b"ready\n":
                raise TransportError("the other end of the raw measurement did not start; see its error above")
            yield
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def ready() -> None:
    """Says that this end sends or answers from now on."""
    print("ready", flush=True)


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(**json.load(sys.stdin))
