"""The engine keeps what every engine promises."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from tllm_core.conformance import EngineConformance


class TestTransformers(EngineConformance):
    engine = "transformers"
    settings: Mapping[str, Any] = {}
    bad_settings: ClassVar[dict[str, Any]] = {"model": "/nowhere/at/all"}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _with_the_tiny_model(cls, settings: dict[str, Any]) -> None:
        cls.settings = settings
