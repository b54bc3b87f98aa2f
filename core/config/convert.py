"""Plain values -> Structs, with errors that name the file (or variable, or flag), the key and what was meant."""

import math
import re
from collections.abc import Mapping
from typing import Any, Never, TypeVar

import msgspec
from msgspec import Struct

from tllm_core.config.shape import allowed_at, keys_at, type_at
from tllm_core.config.sources import KeyPath, Layer, Text, Value, nested
from tllm_core.errors import ConfigError
from tllm_core.registry import suggestion

S = TypeVar("S", bound=Struct)


def convert_options(settings_type: type[S], options: Mapping[str, Any], where: str) -> S:
    """`options` as a `settings_type`; ConfigError names the key below `where` and, for an unknown one, what was meant."""
    prefix = tuple(part for part in [where] if part)
    layer = {(*prefix, *path): value for path, value in flatten_options(options).items()}
    return convert_layer(settings_type, layer, prefix)[0]


def flatten_options(options: Mapping[str, Any], origin: str = "") -> Layer:
    """The top-level keys of `options` as a layer: what is below a key belongs to its value."""
    return {(key,): Value(value, origin) for key, value in options.items()}


def convert_layer(settings_type: type[S], layer: Layer, prefix: KeyPath) -> tuple[S, dict[str, Any]]:
    """The values below `prefix` as a `settings_type`, and as the plain options that made it, with text converted."""
    plain = {path: _plain(settings_type, value, path, len(prefix)) for path, value in layer.items()}
    for path, value in plain.items():
        _check_sane(value, path, layer[path].origin)
    options = nested({path[len(prefix) :]: value for path, value in plain.items()})
    try:
        return msgspec.convert(options, settings_type, strict=True), msgspec.to_builtins(options)
    except msgspec.ValidationError as error:
        _fail(settings_type, str(error), layer, prefix)
    except ConfigError as error:  # from the settings' own check, which knows no place and names the key first
        key = str(error).partition(" ")[0]
        fail(prefix, str(error), _origin(layer, (*prefix, key)))


def check_layer(settings_type: type[Struct], layer: Layer, prefix: KeyPath) -> None:
    """Raises ConfigError for keys and types that `settings_type` does not have; the table need not be complete."""
    fields = msgspec.structs.fields(settings_type)
    relaxed = msgspec.defstruct(
        settings_type.__name__,
        [(item.name, item.type, None) for item in fields],
        rename={item.name: item.encode_name for item in fields},
        forbid_unknown_fields=settings_type.__struct_config__.forbid_unknown_fields,
    )
    convert_layer(relaxed, layer, prefix)


def fail(path: KeyPath, what: str, origin: str = "") -> Never:
    """Raises ConfigError: origin, dotted key, what is wrong."""
    key = ".".join(path).replace(".[", "[")
    raise ConfigError(": ".join(shortened(part) for part in (origin, key, what) if part))


def shortened(text: str, word: int = 100) -> str:
    """The text without the middle of words that nobody could read, and that would hide the rest."""
    return re.sub(rf"[^\s/]{{{word + 1},}}", lambda found: f"{found[0][: word // 2]}...{found[0][-word // 4 :]}", text)


def _plain(settings_type: type[Struct], value: Value, path: KeyPath, depth: int) -> Any:
    if not isinstance(value.value, Text):
        return value.value
    _check_sane(str(value.value), path, value.origin)
    expected = type_at(settings_type, path[depth:])
    if expected is None:  # an unknown key: conversion of the whole says so
        return str(value.value)
    try:
        return _from_text(value.value, expected)
    except msgspec.ValidationError as error:
        _fail(settings_type, str(error), {path: value}, path[:depth], path[depth:])


def _check_sane(value: Any, path: KeyPath, origin: str) -> None:
    """Raises ConfigError for what no setting can be, and what would break far from here."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_sane(key, path, origin)
            _check_sane(inner, (*path, str(key)), origin)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_sane(inner, (*path, f"[{number}]"), origin)
    elif isinstance(value, float) and not math.isfinite(value):
        fail(path, f"must be a finite number, not {value}", origin)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        fail(path, "is a number of more than 64 bits", origin)
    elif isinstance(value, str) and "\0" in value:
        fail(path, f"must not contain a NUL character: {value!r}", origin)
    elif isinstance(value, str) and not _is_unicode(value):
        fail(path, f"is not UTF-8 text: {value!r}", origin)


def _is_unicode(text: str) -> bool:
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def _from_text(text: Text, expected: Any) -> Any:
    try:
        return msgspec.to_builtins(msgspec.convert(str(text), expected, strict=False))
    except msgspec.ValidationError as error:
        best = error
    for attempt in (msgspec.json.decode, _from_commas):
        try:
            return msgspec.to_builtins(attempt(str(text), type=expected, strict=False))
        except msgspec.ValidationError as error:
            best = error if _is_json(text, attempt) else best
        except msgspec.DecodeError:
            continue
    raise best


def _is_json(text: str, attempt: Any) -> bool:
    return attempt is msgspec.json.decode and text.lstrip().startswith(("[", "{"))


def _from_commas(text: str, *, type: Any, strict: bool) -> Any:
    return msgspec.convert([part.strip() for part in text.split(",")], type, strict=strict)


def _fail(settings_type: type[Struct], message: str, layer: Layer, prefix: KeyPath, above: KeyPath = ()) -> Never:
    what, _, place = message.partition(" - at `$")
    inner = above + tuple(re.findall(r"[^.\[\]`]+|\[[^\]]*\]", place))
    unknown = re.search(r"unknown field `(.+)`", what)
    missing = re.search(r"missing required field `(.+)`", what)
    if unknown:
        path = (*prefix, *inner, unknown[1])
        fail(path, f"unknown key{suggestion(unknown[1], keys_at(settings_type, inner))}", _origin(layer, path))
    path = (*prefix, *inner)
    if missing:
        fail(path, f"{missing[1]!r} must be given", _origin(layer, path))
    allowed = ", ".join(repr(value) for value in allowed_at(settings_type, inner))
    fail(path, _wording(what) + (f"; it must be one of: {allowed}" if allowed else ""), _origin(layer, path))


def _origin(layer: Layer, path: KeyPath) -> str:
    related = (value.origin for key, value in layer.items() if key[: len(path)] == path or path[: len(key)] == key)
    return next(related, "")


def _wording(message: str) -> str:
    text = message.replace("`", "").replace("Invalid enum value", "unknown value")
    return text[:1].lower() + text[1:]
