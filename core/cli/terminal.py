"""What people see while they wait, and the end of a world that was started for one command."""

import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from tllm_core.contracts.interfaces import Phase
from tllm_core.errors import ConfigError

if TYPE_CHECKING:
    from tllm_core.config import Settings
    from tllm_core.executor import GenerationExecutor

SHUTDOWN_S = 5.0
"""How long an engine may take to end in order, on a busy machine too; a second signal ends it at once."""
CLEAR = "\r\x1b[K"


class Progress:
    """Shows what start-up is doing on one line of a terminal; elsewhere a line for each new phase, where `lines`."""

    def __init__(self, stream: TextIO | None = None, *, lines: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._lines = lines
        self._terminal = self._stream.isatty()
        self._shown = ""

    def __call__(self, phase: Phase) -> None:
        if phase.rank > 0:
            return
        if self._terminal:
            done = "" if phase.done is None else f" {phase.done:.0%}"
            self._write(f"{CLEAR}{phase.name}{done}")
        elif self._lines and phase.name != self._shown:
            self._write(f"{phase.name}\n")
        self._shown = phase.name

    def clear(self) -> None:
        """Leaves the line empty for what comes next."""
        if self._terminal and self._shown:
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextlib.contextmanager
def running(settings: "Settings", *, lines: bool = False) -> Iterator["GenerationExecutor"]:
    """A world for one command: progress while it starts, and gone within SHUTDOWN_S however the command ends.

    Where `attach.file` is set: somebody else's, which stays.
    """
    from tllm_core.executor import GenerationExecutor

    tell_warnings()
    progress = Progress(lines=lines)
    try:
        if settings.attach.file is None:
            executor = GenerationExecutor.create(settings, on_phase=progress)
        else:
            executor = GenerationExecutor.attach(config=settings)
    finally:
        progress.clear()
    try:
        yield executor
    finally:
        end(executor)


def end(executor: "GenerationExecutor") -> None:
    """In order, or at once where a signal interrupts that."""
    try:
        executor.shutdown(timeout=SHUTDOWN_S)
    except BaseException:
        with _uninterrupted():
            executor.shutdown(timeout=0)
        raise


class _Told(logging.Handler):
    """To stderr, as the command's own words."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            print(f"tllm: {self.format(record)}", file=sys.stderr, flush=True)


def tell_warnings() -> None:
    """From now on what the library warns of is told as the command's own words."""
    logger = logging.getLogger("tllm_core")
    if not any(isinstance(handler, _Told) for handler in logger.handlers):
        logger.addHandler(_Told(logging.WARNING))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    # It is killed by now, so that an impatient third Ctrl-C can only leave something behind.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def table(rows: Sequence[Sequence[str]], write: Callable[[str], object] = print) -> None:
    """Prints rows in columns; the last column is as wide as it likes."""
    if rows:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
            write("  ".join([*cells, row[-1]]).rstrip())


def prompt_text(prompt: str) -> str:
    """The prompt, read from standard input where it is "-". Raises ConfigError for one that is empty or no UTF-8."""
    text = _standard_input() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("the prompt is empty; give it as an argument, or - to read standard input")
    return text


def _standard_input() -> str:
    if sys.stdin is None:
        raise ConfigError("standard input is closed; give the prompt as an argument")
    try:
        return sys.stdin.buffer.read().decode()  # UTF-8, whatever the locale says
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text, at byte {error.start}") from None
