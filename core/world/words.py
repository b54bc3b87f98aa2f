"""How an exception in a rank is told to others."""

import traceback

from tllm_core.contracts.interfaces import Failed
from tllm_core.contracts.messages import Obituary
from tllm_core.errors import ConfigError, TllmError, TransportError
from tllm_core.world.budget import BudgetExhausted


def failed_of(error: BaseException, rank: int | None) -> Failed:
    """To the owner: what people can mend in one line, anything else with its traceback."""
    kind = type(error).__name__
    if isinstance(error, ConfigError | TransportError | BudgetExhausted):
        return Failed(str(error), rank=rank, kind=kind)
    message = str(error) if isinstance(error, TllmError) else f"{kind}: {error}"
    return Failed(message, rank=rank, kind=kind, traceback=_text(error))


def obituary_of(error: BaseException, rank: int = 0) -> Obituary:
    """To every session: the engine's last words."""
    words = failed_of(error, rank)
    return Obituary(words.message, rank, traceback=words.traceback)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
