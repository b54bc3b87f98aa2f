"""`tllm worker`: an engine that no other command owns, for frontends that attach to it."""

import argparse
import contextlib
import os
import shlex
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from tllm_core.cli.arguments import add_common, settings_of
from tllm_core.cli.terminal import SHUTDOWN_S, Progress
from tllm_core.errors import ConfigError, EngineDeadError, TllmError
from tllm_core.registry import Registry

if TYPE_CHECKING:
    from tllm_core.config import Settings
    from tllm_core.executor import GenerationExecutor


class _Asked(BaseException):
    """SIGTERM or SIGINT; no Exception, so that nothing on the way takes it for a failure."""


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm worker`."""
    parser.add_argument(
        "--attach-file", metavar="FILE", required=True, help="where frontends find the engine; made with mode 0600"
    )
    add_common(parser)


def worker(arguments: argparse.Namespace) -> int:
    """Runs an engine until SIGTERM or SIGINT, which end it in an orderly way; a second one ends it at once."""
    from tllm_core.attach import check_free

    settings = settings_of(arguments, Registry(), needs_engine=True)
    if settings.attach.file is not None:
        raise ConfigError("attach.file is set: a worker starts an engine of its own and attaches to none")
    check_free(arguments.attach_file)
    with _signals_raise():
        try:
            _serve(settings, arguments.attach_file)
        except _Asked:
            return 0
    return 0


def _serve(settings: "Settings", path: str) -> None:
    from tllm_core.attach import remove_attach_file
    from tllm_core.executor import GenerationExecutor

    progress = Progress(lines=True)
    try:
        executor = GenerationExecutor.create(settings, on_phase=progress)
    finally:
        progress.clear()
    content = None
    try:
        content = executor.write_attach_file(path)
        print(f"{executor.info.model} is ready; attach with: {_how(path)}", flush=True)
        executor.wait_ended()
        raise _loss(executor)
    finally:
        try:
            if content is not None:
                remove_attach_file(path, content)
        finally:
            _end(executor)


def _end(executor: "GenerationExecutor") -> None:
    try:
        executor.shutdown(timeout=SHUTDOWN_S)
    except _Asked:
        executor.shutdown(timeout=0)


def _loss(executor: "GenerationExecutor") -> TllmError:
    error = executor.failure
    return EngineDeadError("the engine is gone") if error is None else error


def _how(path: str) -> str:
    return f"tllm generate PROMPT --set attach.file={shlex.quote(os.path.abspath(path))}"


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def ask(number: int, frame: FrameType | None) -> None:
        raise _Asked

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
