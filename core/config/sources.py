"""Where values come from: a TOML file, the environment, keywords. Each becomes a flat layer of path -> value."""

import codecs
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from tllm_core.errors import ConfigError

ENV_PREFIX = "TLLM_"
ENV_FILE = "TLLM_CONFIG"
CWD_FILE = "tllm.toml"
MAX_FILE_BYTES = 1 << 20
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
    where = _shown(path)
    try:
        # Some editors begin UTF-8 with a mark of it (a BOM), which TOML does not know.
        return flatten(tomllib.loads(_read_regular(path).removeprefix(codecs.BOM_UTF8).decode()), where)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text, at byte {error.start}") from None
    except RecursionError:
        raise ConfigError(f"{where}: bad TOML: it is nested too deeply") from None
    except ValueError as error:  # also for a number of more digits than Python reads
        raise ConfigError(f"{where}: bad TOML: {error}") from None


def _read_regular(path: Path) -> bytes:
    """The whole file. Of what is no regular file nothing is read: a FIFO may have nothing to say, a device no end."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
            kind = _kind(os.fstat(file.fileno()).st_mode)
            content = b"" if kind else file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"{_shown(path)}: the config file can't be read: {what}") from None
    if kind:
        raise ConfigError(f"{_shown(path)}: a config file must be a regular file, and this is a {kind}")
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{_shown(path)}: a config file may have {MAX_FILE_BYTES} bytes, and this has more")
    return content


def _kind(mode: int) -> str:
    """What it is, where it is no regular file."""
    names = ((stat.S_ISFIFO, "FIFO"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"), (stat.S_ISREG, ""))
    return next((name for is_one, name in names if is_one(mode)), "special file")


def _shown(path: Path) -> str:
    """The path as any terminal can show it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(path))


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
    """The file to read: `config`, else `$TLLM_CONFIG`, else `./tllm.toml` where `look_in_cwd` and it is there.

    Raises ConfigError for an empty path, as of a shell's variable that is not set; `$TLLM_CONFIG` may be empty, as any variable.
    """
    if config is not None and not os.fspath(config):
        raise ConfigError("the path of the config file is empty (--config, config=); name a file, or leave it out")
    chosen = config or environ.get(ENV_FILE)
    if chosen:
        return Path(chosen)
    # A link to nothing is somebody's file too, and a mistake that is worth hearing of.
    return Path(CWD_FILE) if look_in_cwd and os.path.lexists(CWD_FILE) else None


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
