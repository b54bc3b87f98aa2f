"""Verbs that installed plugins add. Plugins are imported for them only where a verb is none of the own, or all are listed."""

import argparse
from typing import Any

from tllm_core.errors import PluginError
from tllm_core.registry import Registry
from tllm_core.registry.interrupts import is_of_signal

Commands = argparse._SubParsersAction


def add_verb_of(name: str, commands: "Commands[Any]", registry: Registry) -> None:
    """Adds the verbs of one plugin. Raises PluginError for one that can't be loaded or fails."""
    plugin = registry.plugin(name)
    others = [other for other in registry.manager.get_plugins() if other is not plugin]
    call = registry.manager.subset_hook_caller("tllm_add_commands", remove_plugins=others)
    try:
        call(commands=commands)
    except (Exception, SystemExit) as error:
        if is_of_signal(error):
            raise
        what = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"plugin {name!r} of {registry.origin('plugin', name)} can't add its verbs: {what}"
        ) from error


def add_all_verbs(commands: "Commands[Any]", registry: Registry) -> list[str]:
    """Adds the verbs of every plugin that works; returns the names of those that don't."""
    broken = []
    for name in registry.names("plugin"):
        try:
            add_verb_of(name, commands, registry)
        except PluginError:
            broken.append(name)
    return broken
