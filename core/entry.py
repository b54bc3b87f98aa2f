"""What the script `tllm` calls. Imported first of all, so that an interrupt during the imports that follow is no traceback."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Runs the command line and returns its exit code."""
    _leave_at_an_interrupt()
    from tllm_core.cli import main as command_line

    try:
        return command_line()
    except KeyboardInterrupt:  # after the verb, while its end is told
        return INTERRUPTED
    finally:
        _leave_at_an_interrupt()


def _leave_at_an_interrupt() -> None:
    # Before and after a verb nothing runs that would need an end, and an exception there may surface anywhere: in an
    # import that swallows it, in a finalizer that prints it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job is not to be interrupted
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


_leave_at_an_interrupt()
