"""Where values come from: a TOML file, the environment, keywords. Each becomes a flat layer of path -> value."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from tllm_core.errors import ConfigError

ENV_PREFIX = "TLLM_"
ENV_FILE = "TLLM_CONFIG"
CWD_FILE = "tllm.toml"
SECTIONS = ("engine", "transport", "launcher", "wire", "liveness", "ledger", "plugins", "attach", "frontends")

KeyPath: TypeAlias = tuple[str, ...]


class Text(str):
    """A value that came as text (`--set`, the environment): converted to what its field is, "2" to 2 for one."""

    __slots__ = ()


class Value(Struct, frozen=True):
    """One value and where it came from."""

    value: Any
    origin: str


Layer: TypeAlias = dict[KeyPath, Value]


def file_layer(path: Path) -> Layer:
    """What a TOML file sets; ConfigError names the file, and the line where the TOML is bad."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: bad TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text, at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: the config file can't be read: {error.strerror or error}") from None
    return flatten(tree, str(path))


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """What TLLM_SECTION__KEY variables set, for sections that there are; others, and empty ones, are not ours."""
    layer: Layer = {}
    for name, text in sorted(environ.items()):
        path = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        if name.startswith(ENV_PREFIX) and len(path) > 1 and path[0] in SECTIONS and all(path) and text:
            layer[path] = Value(Text(text), f"${name}")
    return layer


def keyword_layer(overrides: Mapping[str, Any], origins: Mapping[str, str]) -> Layer:
    """What keywords set: dotted key -> value, where a mapping stands for the keys below it. None is not given."""
    layer: Layer = {}
    for key, value in overrides.items():
        if value is not None:
            overlay(layer, dict(_leaves(tuple(key.split(".")), value, origins.get(key, "keyword"))))
    return layer


def config_path(config: str | os.PathLike[str] | None, environ: Mapping[str, str], look_in_cwd: bool) -> Path | None:
    """The file to read: `config`, else `$TLLM_CONFIG`, else `./tllm.toml` where `look_in_cwd` and it is there."""
    chosen = config or environ.get(ENV_FILE)
    if chosen:
        return Path(chosen)
    return Path(CWD_FILE) if look_in_cwd and Path(CWD_FILE).exists() else None


def flatten(tree: Mapping[str, Any], origin: str) -> Layer:
    """A nested mapping as a layer. Empty tables of sections and plugins set nothing."""
    return dict(_leaves((), tree, origin))


def overlay(lower: Layer, higher: Layer) -> None:
    """Puts `higher` over `lower`: a value replaces the same key, what was below it, and a value that stood above it."""
    for path, value in higher.items():
        shadowed = [old for old in lower if old[: len(path)] == path or path[: len(old)] == old]
        for old in shadowed:
            del lower[old]
        lower[path] = value


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The opposite of `flatten`, for any values."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        table = tree
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value
    return tree


def _leaves(path: KeyPath, value: Any, origin: str) -> Iterator[tuple[KeyPath, Value]]:
    if isinstance(value, Mapping) and (value or len(path) <= 2):
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner, origin)
    else:
        yield path, Value(os.fspath(value) if isinstance(value, os.PathLike) else value, origin)
