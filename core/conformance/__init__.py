"""What plugin authors test with: suites to derive from, and real servers, proxies and engines that can be made to fail.

The suites need pytest and hypothesis (`pip install 'tllm-core[conformance]'`); they are imported when they are first asked for.
The rest needs the standard library and, for each server, the wheel that brings its program.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tllm_core.conformance.broker import BrokerProcess, NatsServer, nats_server, valkey_server

if TYPE_CHECKING:
    from tllm_core.conformance.engine import EngineConformance
    from tllm_core.conformance.launcher import LauncherConformance
    from tllm_core.conformance.transport import TransportConformance

__all__ = [
    "BrokerProcess",
    "EngineConformance",
    "LauncherConformance",
    "NatsServer",
    "TransportConformance",
    "nats_server",
    "valkey_server",
]

_SUITES = {
    "EngineConformance": "tllm_core.conformance.engine",
    "LauncherConformance": "tllm_core.conformance.launcher",
    "TransportConformance": "tllm_core.conformance.transport",
}


def __getattr__(name: str) -> Any:
    module = _SUITES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module not in sys.modules:
        import pytest

        pytest.register_assert_rewrite(module)  # or an assertion that fails would not say what it compared
    return getattr(importlib.import_module(module), name)
