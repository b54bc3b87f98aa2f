"""Plain values -> Structs, with errors that name the file (or variable, or flag), the key and what was meant."""

import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Never, TypeVar

import msgspec
from msgspec import Struct

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
    options = nested({path[len(prefix) :]: value for path, value in plain.items()})
    try:
        return msgspec.convert(options, settings_type, strict=True), msgspec.to_builtins(options)
    except msgspec.ValidationError as error:
        _fail(settings_type, str(error), layer, prefix)
    except ConfigError as error:  # from the settings' own check, which knows no place and names the key first
        key = str(error).partition(" ")[0]
        fail(prefix, str(error), _origin(layer, (*prefix, key)))


def fail(path: KeyPath, what: str, origin: str = "") -> Never:
    """Raises ConfigError: origin, dotted key, what is wrong."""
    key = ".".join(path).replace(".[", "[")
    raise ConfigError(": ".join(part for part in (origin, key, what) if part))


def _plain(settings_type: type[Struct], value: Value, path: KeyPath, depth: int) -> Any:
    if not isinstance(value.value, Text):
        return value.value
    expected = _type_at(settings_type, path[depth:])
    if expected is None:  # an unknown key: conversion of the whole says so
        return str(value.value)
    try:
        return _from_text(value.value, expected)
    except msgspec.ValidationError as error:
        fail(path, _wording(str(error)), value.origin)


def _from_text(text: Text, expected: Any) -> Any:
    try:
        return msgspec.to_builtins(msgspec.convert(str(text), expected, strict=False))
    except msgspec.ValidationError:
        for attempt in (msgspec.json.decode, _from_commas):
            try:
                return msgspec.to_builtins(attempt(str(text), type=expected, strict=False))
            except msgspec.DecodeError:  # ValidationError is one
                continue
        raise


def _from_commas(text: str, *, type: Any, strict: bool) -> Any:
    return msgspec.convert([part.strip() for part in text.split(",")], type, strict=strict)


def _fail(settings_type: type[Struct], message: str, layer: Layer, prefix: KeyPath) -> Never:
    what, _, place = message.partition(" - at `$")
    inner = tuple(re.findall(r"[^.\[\]`]+|\[[^\]]*\]", place))
    unknown = re.search(r"unknown field `(.+)`", what)
    missing = re.search(r"missing required field `(.+)`", what)
    if unknown:
        path = (*prefix, *inner, unknown[1])
        fail(path, f"unknown key{suggestion(unknown[1], _keys_at(settings_type, inner))}", _origin(layer, path))
    path = (*prefix, *inner)
    fail(path, f"{missing[1]!r} must be given" if missing else _wording(what), _origin(layer, path))


def _origin(layer: Layer, path: KeyPath) -> str:
    related = (value.origin for key, value in layer.items() if key[: len(path)] == path or path[: len(key)] == key)
    return next(related, "")


def _wording(message: str) -> str:
    text = message.partition(" - at `$")[0].replace("`", "")
    return text[:1].lower() + text[1:]


# ------------------------------------------------------------------------------------------- types of nested keys


def _type_at(tp: Any, path: KeyPath) -> Any:
    """The type of the field at `path` below type `tp`; None where there is none."""
    for key in path:
        tp = next((found for arm in _arms(tp) if (found := _member(arm, key)) is not None), None)
    return tp


def _keys_at(tp: Any, path: KeyPath) -> list[str]:
    structs = [arm for arm in _arms(_type_at(tp, path)) if isinstance(arm, type) and issubclass(arm, Struct)]
    return [item.encode_name for arm in structs for item in msgspec.structs.fields(arm)]


def _arms(tp: Any) -> tuple[Any, ...]:
    if typing.get_origin(tp) is typing.Annotated:
        return _arms(typing.get_args(tp)[0])
    if typing.get_origin(tp) in (typing.Union, types.UnionType):
        return tuple(arm for member in typing.get_args(tp) for arm in _arms(member))
    return (tp,)


def _member(tp: Any, key: str) -> Any:
    if tp is Any:
        return Any
    if isinstance(tp, type) and issubclass(tp, Struct):
        return next((item.type for item in msgspec.structs.fields(tp) if item.encode_name == key), None)
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return args[1]
    return Any if tp is dict else None
