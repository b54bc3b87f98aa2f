"""The stacks of a rank that hangs: asked for by a signal, written by faulthandler, which needs no interpreter lock for it."""

import faulthandler
import signal
import sys

STACKS_SIGNAL = signal.SIGURG
"""Free for this: nothing in a rank expects it, and a process that has not registered yet ignores it. It is registered before an
engine is loaded, so that an engine that installs a handler of its own keeps that one, and its stacks are not written."""


def answer_with_stacks() -> None:
    """From now on the signal has this process write the stacks of all its threads to its stderr.

    System calls that it interrupts are begun anew where the system can do that; those that wait for a time (a C library's
    `usleep` or `poll`) end early.
    """
    faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__ or 2, all_threads=True, chain=False)
