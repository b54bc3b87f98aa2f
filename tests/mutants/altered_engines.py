"""The echo engine, to be broken in one place."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from tests.conformance.test_engines import SelfDriven
from tllm_core.contracts.interfaces import EngineSpec
from tllm_core.contracts.messages import EngineRequest, Output, SamplingParams, Step
from tllm_core.engines.echo.engine import EchoEngine
from tllm_core.engines.echo.spec import SPEC


class Broken(EchoEngine):
    """`spec` is what a suite or a config names. `change` breaks what `step` returns."""

    spec: EngineSpec

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.spec = structs.replace(SPEC, name="broken", load=f"{cls.__module__}:{cls.__qualname__}")

    def step(self) -> Step:
        step = super().step()
        return Step([changed for output in step.outputs for changed in self.change(output)], step.again)

    def change(self, output: Output) -> list[Output]:
        return [output]

    def asked(self, output: Output) -> SamplingParams:
        """The parameters of the output's request, also with its last output."""
        return self.kept[output.request_id].sampling

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        self.kept = {**getattr(self, "kept", {}), request.request_id: request}


def with_tokens(output: Output, tokens: Any) -> Output:
    return structs.replace(output, token_ids=tuple(tokens))


class BrokenSelfDriven(SelfDriven):
    """As Broken, of an engine with a thread of its own."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.spec = structs.replace(SPEC, name="broken", load=f"{cls.__module__}:{cls.__qualname__}")
