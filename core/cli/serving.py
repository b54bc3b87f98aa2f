"""`tllm worker`: an engine that no other command owns, for frontends that attach to it."""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from tllm_core.cli.arguments import add_common, settings_of
from tllm_core.cli.private_place import private_place
from tllm_core.cli.terminal import SHUTDOWN_S, Progress, tell_warnings
from tllm_core.errors import ConfigError, EngineDeadError, TransportError
from tllm_core.registry import Registry

if TYPE_CHECKING:
    from tllm_core.claim import Claim
    from tllm_core.config import Settings
    from tllm_core.executor import GenerationExecutor


REAP_S = 0.1
"""How long the end of a frontend may stay unnoticed."""


class _Asked(BaseException):
    """SIGTERM or SIGINT; no Exception, so that nothing on the way takes it for a failure."""


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm worker`."""
    parser.add_argument(
        "--attach-file",
        metavar="FILE",
        help="where frontends find the engine; made with mode 0600. May be left out where the settings have frontends.run",
    )
    add_common(parser)


def worker(arguments: argparse.Namespace) -> int:
    """Runs an engine until SIGTERM or SIGINT, which end it in an orderly way; a second one ends it at once.

    With `[frontends] run`: until all of these have ended; 1 where any of them failed.
    """
    from tllm_core.attach import claim_attach_file
    from tllm_core.cli.frontends import check_function

    settings = settings_of(arguments, Registry(), needs_engine=True)
    if settings.attach.file is not None:
        raise ConfigError("attach.file is set: a worker starts an engine of its own and attaches to none")
    if settings.frontends.run is None and arguments.attach_file is None:
        raise ConfigError(
            "give --attach-file FILE, for frontends that attach, or set frontends.run, for those started here"
        )
    with _place(arguments.attach_file) as path, _signals_raise():
        try:
            with claim_attach_file(path) as claim:
                if settings.frontends.run is not None:
                    check_function(settings.frontends.run)
                return _serve(settings, path, claim, _config_of(arguments))
        except _Asked:
            return 0


@contextlib.contextmanager
def _place(attach_file: str | None) -> Iterator[str]:
    """The attach file's path; where none was given, in a directory that only this user can enter, and that goes again."""
    if attach_file is not None:
        yield attach_file
        return
    with private_place() as directory:
        yield os.fspath(directory / "engine.json")


def _config_of(arguments: argparse.Namespace) -> str | None:
    """The file that the settings came from: frontends read their own part of it, such as transport options."""
    from tllm_core.config.sources import config_path

    path = config_path(arguments.config, os.environ, look_in_cwd=True)
    return None if path is None else os.fspath(path)


def _serve(settings: "Settings", path: str, claim: "Claim", config: str | None) -> int:
    from tllm_core.attach import remove_attach_file
    from tllm_core.executor import GenerationExecutor

    tell_warnings()
    progress = Progress(lines=True)
    try:
        executor = GenerationExecutor.create(settings, on_phase=progress)
    finally:
        progress.clear()
    content = None
    try:
        content = executor.write_attach_file(claim)
        if settings.frontends.run is not None:
            return _run_frontends(executor, settings, path, config)
        print(f"{executor.info.model} is ready; attach with: {_how(path)}", flush=True)
        executor.wait_ended()
        if isinstance(executor.failure, TransportError):
            _tell_lost_lane(executor.failure)
        executor.wait_world_ended()
        raise executor.world_failure or executor.failure or EngineDeadError("the engine is gone")
    finally:
        try:
            if content is not None:
                remove_attach_file(path, content)
        finally:
            _end(executor)


def _run_frontends(executor: "GenerationExecutor", settings: "Settings", path: str, config: str | None) -> int:
    """Until all have ended, or the engine has: then they have heard of it themselves, and are given END_S."""
    from tllm_core.cli.frontends import Frontends

    run, count = settings.frontends.run, settings.frontends.count
    assert run is not None
    frontends = Frontends(run, count, path, config)
    try:
        print(f"{executor.info.model} is ready; {run} runs in {count} process{'es' * (count > 1)}", flush=True)
        while frontends.reap():
            if executor.wait_world_ended(REAP_S):
                raise executor.world_failure or executor.failure or EngineDeadError("the engine is gone")
        return 1 if frontends.failed else 0
    finally:
        frontends.end()


def _end(executor: "GenerationExecutor") -> None:
    try:
        executor.shutdown(timeout=SHUTDOWN_S)
    except _Asked:
        executor.shutdown(timeout=0)


def _tell_lost_lane(error: TransportError) -> None:
    """The worker sends nothing over its own lane, so that only frontends need one."""
    print(f"tllm worker: {error}; the engine goes on, and frontends can attach again once it is back", file=sys.stderr)


def _how(path: str) -> str:
    return f"tllm generate PROMPT --set attach.file={shlex.quote(os.path.abspath(path))}"


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def ask(number: int, frame: FrameType | None) -> None:
        raise _Asked

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    # Who started this may ignore its children's ends, and passed that on; then all frontends would seem to end well.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
