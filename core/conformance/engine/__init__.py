"""What every engine owes: `EngineConformance`.

A test file names the engine and inherits the cases:

    from tllm_core.conformance import EngineConformance

    class TestMine(EngineConformance):
        engine = "mine"
        settings = {"model": "tiny", "max_seq_len": 512}

Import it from `tllm_core.conformance`: that sees to it that an assertion which fails says what it compared.
"""

from tllm_core.conformance.engine.suite import EngineConformance

__all__ = ["EngineConformance"]
