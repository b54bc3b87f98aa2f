"""Puts the layers over each other and turns the result into Settings."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from tllm_core.config.convert import check_layer, convert_layer, fail, shortened
from tllm_core.config.settings import (
    AttachSettings,
    Choice,
    EngineChoice,
    FrontendsSettings,
    LedgerSettings,
    PluginSettings,
    Settings,
)
from tllm_core.config.sources import (
    SECTIONS,
    KeyPath,
    Layer,
    Value,
    config_path,
    environment_layer,
    file_layer,
    flatten,
    keyword_layer,
    overlay,
)
from tllm_core.errors import PluginError
from tllm_core.registry import Kind, Registry, suggestion
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.settings import WireSettings

CHOICES: dict[str, Kind] = {"engine": "engine", "transport": "transport", "launcher": "launcher"}
KIND_OF: dict[str, Kind] = {**CHOICES, "plugins": "plugin"}
TABLES: dict[str, type[Struct]] = {
    "wire": WireSettings,
    "liveness": LivenessSettings,
    "ledger": LedgerSettings,
    "attach": AttachSettings,
    "frontends": FrontendsSettings,
}
DEFAULTS = Settings()
IMPLIED = ("default, as the launcher is inline", "default, as the transport is inproc")
CHOSEN = "options"
"""The table that stands for the chosen plugin's own, whatever its name: `[engine.options]`, `--set engine.options.x=1`."""


def load_settings(
    config: str | os.PathLike[str] | Settings | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    look_in_cwd: bool = False,
    registry: Registry | None = None,
) -> Settings:
    """Settings from `overrides` > environment > file > defaults; over `config` where that is Settings already.

    overrides: dotted key -> value ("transport.name", "engine.options": {...}); None is not given; Text is converted.
    origins: where an override came from, by its key; "keyword" otherwise. The options of the chosen engine, transport
    and launcher are checked against their `settings_type`, so these are loaded (an engine's spec, not the engine).
    Raises ConfigError, which names file, variable or flag and the key; PluginError for a choice that can't be loaded.
    """
    environ = os.environ if environ is None else environ
    if isinstance(config, Settings):
        layers = [_layer_of(config)]
    else:
        path = config_path(config, environ, look_in_cwd)
        layers = [*([file_layer(path)] if path else []), environment_layer(environ)]
    layers.append(keyword_layer(overrides or {}, origins or {}))
    return _build(layers, registry or Registry())


def _build(layers: Sequence[Layer], registry: Registry) -> Settings:
    for layer in layers:
        _check_sections(layer)
    names = _names(layers)
    merged: Layer = {}
    named = [_with_chosen_named(layer, names) for layer in layers]
    for layer in named:
        overlay(merged, layer)
    sections: dict[str, Any] = {name: _choice(merged, name, names[name].value, registry) for name in CHOICES}
    # The very object of the defaults is what nobody chose; an equal one that a program made is a choice.
    usual = {name: getattr(DEFAULTS, name) for name in CHOICES}
    sections |= {name: usual[name] for name in CHOICES if not names[name].origin and sections[name] == usual[name]}
    sections |= {name: _table(merged, name, registry) for name in (*TABLES, "plugins")}
    for layer in named:
        _check_hidden(layer, merged, names, registry)
    origins = {".".join(path): value.origin for path, value in merged.items()}
    origins |= {f"{section}.name": name.origin for section, name in names.items() if name.value and name.origin}
    return Settings(**sections, origins=origins)


def _check_sections(layer: Layer) -> None:
    for path, value in layer.items():
        if path[0] not in SECTIONS:
            fail(path[:1], f"unknown section{suggestion(path[0], SECTIONS)}", value.origin)
        if len(path) == 1:
            fail(path, f"must be a section: [{path[0]}]", value.origin)


# ------------------------------------------------------------------------------- engine, transport and launcher


def _names(layers: Sequence[Layer]) -> dict[str, Value]:
    names = {section: Value(None, "") for section in CHOICES}
    for layer in layers:
        names |= {section: layer[section, "name"] for section in CHOICES if (section, "name") in layer}
        for section in CHOICES:  # also of one that another layer goes before
            _check_name(section, layer.get((section, "name")))
    names = {section: Value(name.value and str(name.value), name.origin) for section, name in names.items()}
    return names | _implied(names["transport"].value, names["launcher"].value)


def _check_name(section: str, name: Value | None) -> None:
    if name is not None and name.origin and (not isinstance(name.value, str) or not name.value):
        fail((section, "name"), 'must be a name or "module:Object"', name.origin)


def _implied(transport: str | None, launcher: str | None) -> dict[str, Value]:
    # inproc and inline stay in this process, so that one of them alone means both.
    implied = {}
    if transport is None:
        inline = launcher == "inline"
        implied["transport"] = Value("inproc", IMPLIED[0]) if inline else Value("zmq", "")
    if launcher is None:
        inproc = transport == "inproc"
        implied["launcher"] = Value("inline", IMPLIED[1]) if inproc else Value("spawn", "")
    return implied


def _with_chosen_named(layer: Layer, names: Mapping[str, Value]) -> Layer:
    renamed: Layer = {path: value for path, value in layer.items() if not _is_chosen(path, names)}
    for path, value in layer.items():
        if _is_chosen(path, names):
            overlay(renamed, {(path[0], str(names[path[0]].value), *path[2:]): value})
    return renamed


def _is_chosen(path: KeyPath, names: Mapping[str, Value]) -> bool:
    return path[0] in CHOICES and len(path) > 2 and path[1] == CHOSEN and names[path[0]].value is not None


def _choice(layer: Layer, section: str, name: str | None, registry: Registry) -> EngineChoice | Choice:
    tables: dict[str, Layer] = {}
    for path, value in layer.items():
        if path[0] != section or path == (section, "name"):
            continue
        if len(path) == 2:
            fail(path, _not_a_key(section, path[1], registry), value.origin)
        tables.setdefault(path[1], {})[path] = value
    for other in (key for key in tables if key not in (name, CHOSEN)):
        _check_other_table(section, other, tables[other], registry)
    if name is None:
        return EngineChoice()
    settings_type = _settings_type(section, name, registry, layer.get((section, "name")))
    options = convert_layer(settings_type, tables.get(name, {}), (section, name))[1]
    return EngineChoice(name, options) if section == "engine" else Choice(name, options)


def _not_a_key(section: str, key: str, registry: Registry) -> str:
    names = registry.names(CHOICES[section])
    if key in (*names, CHOSEN):
        return f"must be a table of options: [{section}.{key}]"
    return f"unknown key{suggestion(key, ['name', CHOSEN, *names])}"


def _check_other_table(section: str, name: str, table: Layer, registry: Registry) -> None:
    """What is not chosen is not used, but a mistake in it would show only on the day that it is."""
    kind = CHOICES[section]
    _check_installed(next(iter(table)), next(iter(table.values())), registry.names(kind))
    if ":" in name:
        return
    try:
        settings_type = getattr(registry, kind)(name).settings_type
    except PluginError:  # nothing that concerns anybody who does not choose it
        return
    check_layer(settings_type, table, (section, name))


def _check_hidden(layer: Layer, merged: Layer, names: Mapping[str, Value], registry: Registry) -> None:
    """What another layer goes before is not used, but a wrong type would show only on the day that it is."""
    hidden = {path: value for path, value in layer.items() if merged.get(path) is not value}
    for section, settings_type in TABLES.items():
        if table := {path: value for path, value in hidden.items() if path[0] == section}:
            check_layer(settings_type, table, (section,))
    for section, name in names.items():
        prefix = (section, str(name.value))
        table = {path: value for path, value in hidden.items() if path[:2] == prefix and len(path) > 2}
        if table and name.value is not None:
            check_layer(_settings_type(section, str(name.value), registry, name), table, prefix)


def _check_installed(path: KeyPath, value: Value, names: Sequence[str]) -> None:
    if path[1] not in names and ":" not in path[1]:
        known = f"{suggestion(path[1], [*names, CHOSEN])}; installed: {', '.join(names)}"
        fail(path[:2], f"there is no {KIND_OF[path[0]]} {path[1]!r}{known}", value.origin)


def _settings_type(section: str, name: str, registry: Registry, origin: Value | None) -> type[Struct]:
    try:
        found = getattr(registry, CHOICES[section])(name)
    except PluginError as error:
        if origin is None:
            raise
        raise PluginError(shortened(f"{origin.origin}: {section}.name: {error}")) from error
    return found.settings_type  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------- other tables


def _table(layer: Layer, section: str, registry: Registry) -> Struct:
    values = {path: value for path, value in layer.items() if path[0] == section}
    if section != "plugins":
        return convert_layer(TABLES[section], values, (section,))[0]
    options = {path: value for path, value in values.items() if len(path) > 2}
    enabled = convert_layer(_Enable, {path: values[path] for path in values if len(path) == 2}, (section,))[0].enable
    _check_enabled(enabled, values.get((section, "enable")), registry)
    for path, value in options.items():
        if path[1] not in enabled:
            _check_installed(path, value, registry.names("plugin"))
    return PluginSettings(enabled, _plugin_options(options))


def _check_enabled(names: Sequence[str], given: Value | None, registry: Registry) -> None:
    """Raises PluginError for one that is not installed; whether it works is seen where it is loaded."""
    for name in names:
        try:
            registry.origin("plugin", name)
        except PluginError as error:
            where = "" if given is None else f"{given.origin}: "
            raise PluginError(shortened(f"{where}plugins.enable: {error}")) from error


class _Enable(Struct, forbid_unknown_fields=True):
    enable: tuple[str, ...] = ()


def _plugin_options(layer: Layer) -> dict[str, dict[str, Any]]:
    tables: dict[str, Layer] = {}
    for path, value in layer.items():
        tables.setdefault(path[1], {})[path] = value
    return {name: convert_layer(_Anything, table, ("plugins", name))[1] for name, table in tables.items()}


class _Anything(Struct):
    """Accepts any keys: a plugin checks its own options."""


def _is_choice(section: str, choice: EngineChoice | Choice, settings: Settings) -> bool:
    """Somebody chose it, be it what is the default as well; what followed from another choice may follow from a new one."""
    origin = settings.origins.get(f"{section}.name")
    return choice is not getattr(DEFAULTS, section) if origin is None else origin not in IMPLIED


def _layer_of(settings: Settings) -> Layer:
    layer: Layer = {}
    for section in CHOICES:
        choice = getattr(settings, section)
        if _is_choice(section, choice, settings):
            layer[section, "name"] = Value(choice.name, "")
            layer |= {(section, str(choice.name), *path): value for path, value in flatten(choice.options, "").items()}
    for section in TABLES:
        given = msgspec.to_builtins(getattr(settings, section))
        usual = msgspec.to_builtins(TABLES[section]())
        layer |= {(section, key): Value(given[key], "") for key in given if given[key] != usual[key]}
    layer["plugins", "enable"] = Value(settings.plugins.enable, "")
    layer |= {("plugins", *path): value for path, value in flatten(settings.plugins.options, "").items()}
    return {path: Value(value.value, settings.origins.get(".".join(path), "Settings")) for path, value in layer.items()}
