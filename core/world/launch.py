"""Who starts an engine world: this process itself (`inline`), or a watcher beside it (`spawn`)."""

from tllm_core.world.inline import InlineLauncher, InlineSettings
from tllm_core.world.spawn import SpawnLauncher, SpawnSettings

__all__ = ["InlineLauncher", "InlineSettings", "SpawnLauncher", "SpawnSettings"]
