"""What every engine owes: `EngineConformance`.

A test file names the engine and inherits the cases:

    from tllm_core.conformance import EngineConformance

    class TestMine(EngineConformance):
        engine = "mine"
        settings = {"model": "tiny", "max_seq_len": 512}
"""

import pytest

_MODULES = (
    "answers",
    "driven",
    "subject",
    "tokens",
    "endings",
    "logprobs",
    "limits",
    "aborts",
    "pace",
    "controls",
    "closing",
    "behind",
)
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from tllm_core.conformance.engine.suite import EngineConformance  # noqa: E402 - after the assertions are registered

__all__ = ["EngineConformance"]
