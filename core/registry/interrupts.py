"""Tells what a signal handler raised from what the code raised that it came upon."""

import signal
from types import CodeType, TracebackType
from typing import Any


def is_of_signal(error: BaseException) -> bool:
    """Whether a handler of this process raised it: it would have come in whatever code ran at that moment.

    Of the default handler of SIGINT, which has no frame, it is KeyboardInterrupt.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(code in handlers for code in _codes(error.__traceback__))


def _codes(traceback: TracebackType | None) -> list[CodeType]:
    found = []
    while traceback is not None:
        found.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return found


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, a `functools.partial` of one, or an object that can be called."""
    while hasattr(handler, "func"):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
