"""Our own launchers, and attaching to what they start, keep what every launcher promises."""

from tllm_core.conformance import LauncherConformance


class TestSpawn(LauncherConformance):
    launcher = "spawn"


class TestInline(LauncherConformance):
    launcher = "inline"
