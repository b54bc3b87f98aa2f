"""`tllm plugins`, `config` and `explain`: what is there, what is set, and what would be started."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tllm_core.cli.arguments import add_common, add_debug, settings_of
from tllm_core.cli.terminal import running, table
from tllm_core.contracts.interfaces import Capability
from tllm_core.registry import Registry, load_object

if TYPE_CHECKING:
    from tllm_core.config import Settings

Line = tuple[str, str, str]


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm plugins`."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    add_debug(parser)


def plugins(arguments: argparse.Namespace) -> int:
    """Prints every entry point: name, kind, distribution, version, state. A plugin that is broken is no failure of it."""
    import msgspec

    with _nothing_printed():
        found = Registry().found()
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
        return 0
    rows = [("NAME", "KIND", "DISTRIBUTION", "VERSION", "STATE")]
    for item in found:
        state = f"{item.status}: {item.detail}" if item.detail else item.status
        rows.append((item.name, item.kind, item.distribution, item.version, _printable(state)))
    table(rows)
    return 0


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """What native code and child processes print while plugins are imported goes to standard error: the answer stays whole."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _printable(text: str) -> str:
    """One line, and no orders to the terminal: the words are a plugin's."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm config`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object: key -> value and origin")
    add_common(parser)


def config(arguments: argparse.Namespace) -> int:
    """Prints every setting with its value and origin, secrets masked."""
    from tllm_core.config import shown_settings

    registry = Registry()
    lines = shown_settings(settings_of(arguments, registry), registry)
    if arguments.json:
        print(json.dumps({line.key: {"value": line.value, "origin": line.origin} for line in lines}, indent=2))
        return 0
    table([(line.key, json.dumps(line.value, ensure_ascii=False), line.origin) for line in lines])
    return 0


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm explain`."""
    parser.add_argument("--start", action="store_true", help="really start it, and show its processes and sockets")
    add_common(parser)


def explain(arguments: argparse.Namespace) -> int:
    """Prints what would be started, or with `--start` is, and why."""
    from tllm_core.plan import Plan

    registry = Registry()
    settings = settings_of(arguments, registry, needs_engine=True)
    if settings.attach.file is not None:
        table([("attach", settings.attach.file, f"chosen by {settings.origins.get('attach.file', 'default')}")])
    else:
        Plan.of(settings, registry)  # what can't work is refused, and not drawn first
        table([*_choices(settings, registry), *_processes(settings, registry)])
    if arguments.start:
        with running(settings, lines=True) as executor:
            print()
            table(list(_facts("", executor.describe())))
    return 0


def _choices(settings: "Settings", registry: Registry) -> Iterator[Line]:
    for section in ("launcher", "transport", "engine"):
        name = str(getattr(settings, section).name)
        why = settings.origins.get(f"{section}.name", _DEFAULTS.get(section, "default"))
        yield section, name, f"from {registry.origin(section, name)}; chosen by {why}"
    prefix = f"engine.{settings.engine.name}.model"
    model = _engine_settings(settings, registry).get("model")
    if model is not None:
        yield "model", str(model), f"chosen by {settings.origins.get(prefix, 'default of the engine')}"


_DEFAULTS = {"transport": "default: works between processes", "launcher": "default: processes on this host"}


def _processes(settings: "Settings", registry: Registry) -> Iterator[Line]:
    transport = registry.transport(settings.transport.name)
    if Capability.CROSS_PROCESS not in registry.launcher(settings.launcher.name).needs:
        yield "processes", "1", "the engine runs in a thread of this process"
    else:
        ranks = _world_size(settings, registry)
        yield "processes", str(ranks + 2), f"this one, a watcher, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    capabilities = ", ".join(str(item.name) for item in transport.capabilities) or "none"
    yield "sockets", settings.transport.name, f"bound when it starts; capabilities: {capabilities}"


def _engine_settings(settings: "Settings", registry: Registry) -> dict[str, Any]:
    import msgspec

    from tllm_core.config import convert_options

    spec = registry.engine(str(settings.engine.name))
    options = convert_options(spec.settings_type, settings.engine.options, f"engine.{settings.engine.name}")
    return {item.name: getattr(options, item.name) for item in msgspec.structs.fields(options)}


def _world_size(settings: "Settings", registry: Registry) -> int:
    from tllm_core.config import convert_options

    spec = registry.engine(str(settings.engine.name))
    if spec.world_size is None:
        return 1
    options = convert_options(spec.settings_type, settings.engine.options, f"engine.{settings.engine.name}")
    return int(load_object(spec.world_size)(options))


def _facts(prefix: str, facts: Any) -> Iterator[tuple[str, str]]:
    if isinstance(facts, dict) and facts:
        for key, value in facts.items():
            yield from _facts(f"{prefix}.{key}".lstrip("."), value)
    else:
        yield prefix, facts if isinstance(facts, str) else json.dumps(facts)
