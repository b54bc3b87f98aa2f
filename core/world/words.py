"""How an exception in a rank is told to others."""

import traceback

from tllm_core.contracts.interfaces import Failed
from tllm_core.contracts.messages import Obituary
from tllm_core.errors import ConfigError, TllmError, TransportError
from tllm_core.world.budget import BudgetExhausted

MESSAGE_CHARS = 8192
TRACEBACK_CHARS = 32768


def failed_of(error: BaseException, rank: int | None) -> Failed:
    """To the owner: what people can mend in one line, anything else with its traceback. Both are bounded."""
    kind = type(error).__name__
    if isinstance(error, ConfigError | TransportError | BudgetExhausted):
        return Failed(_bounded(_said(error), MESSAGE_CHARS), rank=rank, kind=kind)
    message = _said(error) if isinstance(error, TllmError) else f"{kind}: {_said(error)}"
    return Failed(
        _bounded(message, MESSAGE_CHARS), rank=rank, kind=kind, traceback=_bounded(_text(error), TRACEBACK_CHARS)
    )


def obituary_of(error: BaseException, rank: int = 0) -> Obituary:
    """To every session: the engine's last words."""
    words = failed_of(error, rank)
    return Obituary(words.message, rank, traceback=words.traceback)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"<what it says can't be had: its __str__ raised {type(failure).__name__}>"


def _text(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:
        return f"<its traceback can't be had: {type(failure).__name__}>"


def _bounded(text: str, limit: int) -> str:
    """The beginning and the end of it, `limit` characters in all, with what can't cross as UTF-8 escaped."""
    left_out = len(text) - limit
    if left_out > 0:
        half = limit // 2
        text = f"{text[:half]}\n[... {left_out} characters are left out ...]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
