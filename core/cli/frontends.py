"""Frontend processes beside a worker: `[frontends]` has a function run in several, each with an executor of its own.

`python -m tllm_core.cli.frontends ATTACH_FILE MODULE:FUNCTION PARENT` is one of them. None is started again, and the end
of one touches no other.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, Never

from tllm_core.errors import ConfigError
from tllm_core.world.process import die_with_parent, kill_group

END_S = 5.0
"""How long a frontend that was told to end may take before it is killed."""


class Frontends:
    """`count` processes that run `function`, attached to the engine of `attach_file`. Not for several threads."""

    def __init__(self, function: str, count: int, attach_file: str, config: str | None) -> None:
        command = [sys.executable, "-m", __name__, os.path.abspath(attach_file), function, str(os.getpid())]
        environ = dict(os.environ) if config is None else {**os.environ, "TLLM_CONFIG": os.path.abspath(config)}
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.failed = 0
        try:
            for number in range(count):
                # A group of its own: Ctrl-C in a terminal reaches the worker, which then ends them in their turn.
                self._running[number] = subprocess.Popen(command, env=environ, process_group=0)
        except BaseException:
            self.end()
            raise

    def reap(self) -> bool:
        """Notes which ones have ended, and says so of those that failed; True while any runs. Never blocks."""
        for number, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[number]
            if code:
                self.failed += 1
                print(f"tllm worker: frontend {number} (process {process.pid}) {_ending(code)}", file=sys.stderr)
        return bool(self._running)

    def end(self) -> None:
        """Tells all to end, waits for them, and kills what is left after END_S."""
        self.reap()
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_group(process.pid)
                process.wait()
        self._running.clear()


def check_function(name: str) -> None:
    """Raises ConfigError where `name` is not written as MODULE:FUNCTION; whether it is there is seen where it is called."""
    module, colon, function = name.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), function))):
        raise ConfigError(f'frontends.run: must be "module:function", not {name!r}')


def load_function(name: str) -> Any:
    """The function; modules are looked for in the current directory too. Raises ConfigError where there is none."""
    check_function(name)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"frontends.run: there is no module {module!r} here or installed") from None
    if not callable(found):
        raise ConfigError(f"frontends.run: {module} has no function {function!r}")
    return found


def run(attach_file: str, name: str) -> None:
    """Calls the function with an executor that is attached; a coroutine function in a loop of its own."""
    from tllm_core.executor import GenerationExecutor

    function = load_function(name)
    with GenerationExecutor.attach(attach_file) as executor:
        if inspect.iscoroutinefunction(function):
            asyncio.run(function(executor))
        else:
            function(executor)


def _ending(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _leave(number: int, frame: FrameType | None) -> Never:
    raise SystemExit(0)


def main() -> int:
    """One frontend. SIGTERM ends it in an orderly way, unless the function has a handler of its own."""
    attach_file, name, parent = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGTERM, _leave)
    try:
        run(attach_file, name)
    except ConfigError as error:
        print(f"tllm worker: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
