"""What is expected at a nested key of a settings type: its type, its keys, the values that it allows."""

import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from tllm_core.config.sources import KeyPath


def type_at(tp: Any, path: KeyPath) -> Any:
    """The type of what is at `path` below type `tp`, where "[...]" is any element; None where there is none."""
    for key in path:
        members = [found for arm in _arms(tp) if (found := _member(arm, key)) is not None]
        tp = typing.Union[tuple(members)] if members else None  # noqa: UP007 - of a number that only running tells
    return tp


def keys_at(tp: Any, path: KeyPath) -> list[str]:
    """The keys that a table at `path` may have."""
    return [item.encode_name for arm in _structs_at(tp, path) for item in msgspec.structs.fields(arm)]


def allowed_at(tp: Any, path: KeyPath) -> list[Any]:
    """The values that may stand at `path`, where they are a list of some (Literal, Enum, the tag of a Struct)."""
    values = [value for arm in _arms(type_at(tp, path)) for value in _values(arm)]
    if values or not path:
        return values
    configs = [arm.__struct_config__ for arm in _structs_at(tp, path[:-1])]
    return [config.tag for config in configs if config.tag_field == path[-1]]


def _structs_at(tp: Any, path: KeyPath) -> list[type[Struct]]:
    return [arm for arm in _arms(type_at(tp, path)) if isinstance(arm, type) and issubclass(arm, Struct)]


def _values(arm: Any) -> list[Any]:
    if typing.get_origin(arm) is Literal:
        return list(typing.get_args(arm))
    if isinstance(arm, type) and issubclass(arm, enum.Enum):
        return [member.value for member in arm]
    return []


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
    if key.startswith("[") and origin in (list, tuple, set, frozenset):
        position = int(key[1:-1]) if key[1:-1].isdigit() else 0
        return args[0] if len(args) == 1 or args[-1] is ... else args[min(position, len(args) - 1)]
    return Any if tp is dict else None
