"""Frontend processes beside a worker: `[frontends]` has a function run in several, each with an executor of its own.

`python -m tllm_core.cli.frontends MODULE:FUNCTION PARENT ATTACH_FILE` is one of them; without an attach file, it only looks
for the function. None is started again, and the end of one touches no other.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from types import FrameType
from typing import Any, Never

from tllm_core.errors import ConfigError
from tllm_core.world.process import die_with_parent, kill_group

WRONG = 2
"""Exit code for a function that is not there."""
END_S = 5.0
"""How long a frontend that was told to end may take before it is killed."""


class Frontends:
    """`count` processes that run `function`, attached to the engine of `attach_file`. Not for several threads."""

    def __init__(self, function: str, count: int, attach_file: str, config: str | None) -> None:
        command = [*_command(function), os.path.abspath(attach_file)]
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
    """Has a process look whether the function is there, before a model is loaded for it: its module is not to be imported here.

    Raises ConfigError where it is not, or the module fails, with what it wrote to its stderr.
    """
    with tempfile.TemporaryFile() as said:  # no pipe: what the module starts may hold it open for ever
        code = subprocess.run(_command(name), stdout=subprocess.DEVNULL, stderr=said, check=False).returncode
        said.seek(0)
        words = said.read().decode("utf-8", "replace").strip()
    if code == WRONG:
        raise ConfigError(words.splitlines()[-1])
    if code:
        raise ConfigError(f"frontends.run: {name} can't be imported; {_ending(code)}:\n{words}")


def _command(function: str) -> list[str]:
    return [sys.executable, "-m", __name__, function, str(os.getpid())]


def load_function(name: str) -> Any:
    """The function; modules are looked for in the current directory too. Raises ConfigError where there is none."""
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
    name, parent, *attach_file = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGTERM, _leave)
    if not attach_file:
        _look_for(name)
    try:
        run(attach_file[0], name)
    except ConfigError as error:
        print(f"tllm worker: {error}", file=sys.stderr)
        return WRONG
    return 0


def _look_for(name: str) -> Never:
    """Ends the process at once: what the module may have started is not waited for."""
    try:
        load_function(name)
        code = 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = WRONG
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
