"""What every launcher owes: `LauncherConformance`.

A test file names the launcher and inherits the cases:

    from tllm_core.conformance import LauncherConformance

    class TestMine(LauncherConformance):
        launcher = "mine"
        settings = {"queue": "tests"}
"""

import pytest

_MODULES = ("attached", "deaths", "ends", "failures", "owners", "starts", "subject", "watched")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from tllm_core.conformance.launcher.suite import LauncherConformance  # noqa: E402 - after the assertions are registered

__all__ = ["LauncherConformance"]
