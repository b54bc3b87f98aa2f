"""tllm-core: the executor boundary for LLM inference."""

TYPE_CHECKING = False  # as type checkers know it: `typing` alone takes longer to import than the rest of this package
if TYPE_CHECKING:
    from typing import Any

    from tllm_core.contracts.messages import EngineInfo as EngineInfo
    from tllm_core.contracts.messages import GenerationRequest as GenerationRequest
    from tllm_core.contracts.messages import GuidedDecoding as GuidedDecoding
    from tllm_core.contracts.messages import Logprob as Logprob
    from tllm_core.contracts.messages import SamplingParams as SamplingParams
    from tllm_core.contracts.messages import TokenIds as TokenIds
    from tllm_core.errors import BrokerLost as BrokerLost
    from tllm_core.errors import Cause as Cause
    from tllm_core.errors import ConfigError as ConfigError
    from tllm_core.errors import ControlError as ControlError
    from tllm_core.errors import EngineDeadError as EngineDeadError
    from tllm_core.errors import EngineStartError as EngineStartError
    from tllm_core.errors import ExecutorClosedError as ExecutorClosedError
    from tllm_core.errors import Expelled as Expelled
    from tllm_core.errors import FrameTooLarge as FrameTooLarge
    from tllm_core.errors import ModelError as ModelError
    from tllm_core.errors import NotAdmitted as NotAdmitted
    from tllm_core.errors import Overloaded as Overloaded
    from tllm_core.errors import PluginError as PluginError
    from tllm_core.errors import Refused as Refused
    from tllm_core.errors import RequestError as RequestError
    from tllm_core.errors import ResultBusyError as ResultBusyError
    from tllm_core.errors import TllmError as TllmError
    from tllm_core.errors import TransportError as TransportError
    from tllm_core.executor import GenerationExecutor as GenerationExecutor
    from tllm_core.health import Health as Health
    from tllm_core.ledger.result import CompletionOutput as CompletionOutput
    from tllm_core.ledger.result import GenerationResult as GenerationResult
    from tllm_core.llm import LLM as LLM
    from tllm_core.llm import RequestOutput as RequestOutput

__version__ = "0.1.0"

# Loaded on first use: engines and watchers import this package too, and must stay small and quick to start.
_HOMES = {
    "contracts.messages": (
        "EngineInfo",
        "GenerationRequest",
        "GuidedDecoding",
        "Logprob",
        "SamplingParams",
        "TokenIds",
    ),
    "errors": (
        "BrokerLost",
        "Cause",
        "ConfigError",
        "ControlError",
        "EngineDeadError",
        "EngineStartError",
        "ExecutorClosedError",
        "Expelled",
        "FrameTooLarge",
        "ModelError",
        "NotAdmitted",
        "Overloaded",
        "PluginError",
        "Refused",
        "RequestError",
        "ResultBusyError",
        "TllmError",
        "TransportError",
    ),
    "executor": ("GenerationExecutor",),
    "health": ("Health",),
    "ledger.result": ("CompletionOutput", "GenerationResult"),
    "llm": ("LLM", "RequestOutput"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> "Any":
    import importlib

    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
