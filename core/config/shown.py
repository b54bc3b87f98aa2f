"""Settings as people see them: every key with its value and origin, secrets masked."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from tllm_core.config.convert import convert_options
from tllm_core.config.settings import Settings
from tllm_core.config.sources import SECTIONS
from tllm_core.registry import Registry

MASK = "***"
_SECRET_WORDS = frozenset({"key", "password", "passwd", "secret", "token", "credentials"})
_NOT_SECRET = frozenset({"file", "path", "dir", "id", "s"})
"""Last words that make a name harmless: `key_file` is a place, `stop_token_id` a number, `token_timeout_s` a duration."""


class Shown(Struct, frozen=True):
    """One line of `tllm config`; `value` is plain and masked."""

    key: str
    value: Any
    origin: str


def shown_settings(settings: Settings, registry: Registry | None = None) -> list[Shown]:
    """Every setting with its value and origin, the defaults of the chosen engine, transport and launcher included."""
    registry = registry or Registry()
    return [
        Shown(".".join(path), masked(path[-1], value), _origin(settings.origins, path))
        for section in SECTIONS
        for path, value in _rows(settings, section, registry)
    ]


def unused_tables(settings: Settings) -> dict[str, str]:
    """The tables of engines, transports and launchers that are not chosen and of plugins that are not enabled: with origin."""
    chosen: dict[str, tuple[str, ...]] = {"plugins": settings.plugins.enable}
    chosen |= {section: (str(getattr(settings, section).name),) for section in ("engine", "transport", "launcher")}
    unused: dict[str, str] = {}
    for key, origin in settings.origins.items():
        section, _, rest = key.partition(".")
        used = any(rest.startswith(f"{name}.") for name in chosen.get(section, ()))
        if section in chosen and "." in rest and not used:
            module, colon, below = rest.rpartition(":")
            unused.setdefault(f"{section}.{module}{colon}{below.partition('.')[0]}", origin)
    return unused


def masked(key: str, value: Any) -> Any:
    """`value` with what must not be printed replaced: all of it where `key` names a secret, else passwords inside URLs."""
    words = key.lower().replace("-", "_").split("_")
    if isinstance(value, Mapping):
        return {name: masked(str(name), inner) for name, inner in value.items()}
    if value is not None and _SECRET_WORDS & set(words) and words[-1] not in _NOT_SECRET:
        return MASK
    if isinstance(value, list | tuple):
        return [masked(key, inner) for inner in value]
    return _masked_url(value) if isinstance(value, str) else value


def _masked_url(text: str) -> str:
    text = re.sub(r"(?<=://)[^/@\s]*(?=@)", MASK, text)
    return re.sub(r"(?i)([?&](?:password|passwd|token|secret|key)=)[^&\s]*", rf"\g<1>{MASK}", text)


def _rows(settings: Settings, section: str, registry: Registry) -> Iterator[tuple[tuple[str, ...], Any]]:
    chosen = getattr(settings, section)
    if section in ("engine", "transport", "launcher"):
        yield (section, "name"), chosen.name
        if chosen.name is not None:
            settings_type = getattr(registry, section)(chosen.name).settings_type
            where = f"{section}.{chosen.name}"
            yield from _fields((section, chosen.name), convert_options(settings_type, chosen.options, where))
    elif section == "plugins":
        yield (section, "enable"), list(chosen.enable)
        for name, options in chosen.options.items():
            yield from (((section, name, key), value) for key, value in options.items())
    else:
        yield from _fields((section,), chosen)


def _fields(prefix: tuple[str, ...], struct: Struct) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in msgspec.to_builtins(struct).items():
        yield (*prefix, key), value


def _origin(origins: Mapping[str, str], path: tuple[str, ...]) -> str:
    key = ".".join(path)
    below = {origin for name, origin in origins.items() if name == key or name.startswith(f"{key}.")}
    return ", ".join(sorted(below)) or "default"
