"""The echo engine: deterministic tokens without a model, and faults on demand. It measures and tests the boundary."""

from tllm_core.engines.echo.spec import SPEC, EchoSettings, Fault
from tllm_core.engines.echo.tokens import expected_tokens

__all__ = ["SPEC", "EchoSettings", "Fault", "expected_tokens"]
