"""The command line: `tllm VERB`. Verbs are thin; what they do is in the library.

Exit codes: 0 done, 1 failed, 2 wrong use, setting or input, 130 interrupted. A reader that closes the pipe is no failure.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Never

from tllm_core.errors import ConfigError, EngineDeadError, RequestError, TllmError

OK, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 128 + signal.SIGINT

_CONFIG_ERRORS = ("ConfigError", "PluginError", "Broken", "MissingExtra", "ModelError")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    if not _prepare_streams():
        return FAILED
    debug = False
    try:
        from tllm_core.cli.arguments import parse

        arguments = parse(sys.argv[1:] if argv is None else list(argv))
        debug = getattr(arguments, "debug", False)
        _let_interrupts_raise()
        code = int(arguments.run(arguments) or OK)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return OK
    except TllmError as error:
        if debug:
            traceback.print_exc()
        return _report(error)
    except OSError as error:
        if debug:
            traceback.print_exc()
        print(f"tllm: {_os_error_in_words(error)}", file=sys.stderr)
        _drop_output()
        return FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"tllm: internal error: {error!r}; --debug shows where", file=sys.stderr)
        return FAILED
    return code


def _prepare_streams() -> bool:
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the process's life
    if sys.stdout is None:
        print("tllm: standard output is closed; there is nowhere to answer to", file=sys.stderr)
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may say what the terminal has no characters for
        sys.stdout.reconfigure(errors="replace")
    return True


def _let_interrupts_raise() -> None:
    """From here on something may run that needs an orderly end. Before, `tllm_core.entry` ends the process at once."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _drop_output() -> None:
    """What is still buffered has nowhere to go; the interpreter's own last flush must not stumble over it."""
    with contextlib.suppress(OSError):  # one without a descriptor, as a program that calls `main` may have put there
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _os_error_in_words(error: OSError) -> str:
    """What names no file failed in writing the answer, most likely: whoever opens a file here says which."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
        return f"standard output can't be written: {error.strerror}"
    return str(error)


def _report(error: TllmError) -> int:
    from tllm_core.config.convert import shortened

    print(f"tllm: {shortened(describe(error))}", file=sys.stderr)
    # A model that can't be used, for one, is found out in the engine's process, where what was raised was a ConfigError.
    raised = error.root_cause.kind if isinstance(error, EngineDeadError) else ""
    return WRONG_USE if isinstance(error, ConfigError | RequestError) or raised in _CONFIG_ERRORS else FAILED


def describe(error: TllmError) -> str:
    """The error in words; of a dead engine its cause, with the end of its stderr where it left no message of its own."""
    if not isinstance(error, EngineDeadError):
        return str(error)
    cause = error.root_cause
    tail = (cause.stderr_tail or "").strip()
    return f"{cause.message}\n{tail}" if tail and not cause.traceback else cause.message


def _terminated(number: int, frame: FrameType | None) -> Never:
    sys.exit(128 + number)
