"""Numbers in settings: what can't be meant is refused with its key, in every room, also in those to come."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from tllm_core.config import convert_options
from tllm_core.config.load import CHOICES, TABLES
from tllm_core.errors import ConfigError, PluginError
from tllm_core.registry import Registry

LARGEST = 2**63
ZERO_MEANS = {
    "engine.echo.step_interval_s": "as fast as it can",
    "engine.echo.load_delay_s": "loads at once",
    "engine.echo.eos_token_id": "a token's id",
    "engine.echo.faults.after": "the first call",
    "engine.echo.faults.token": "a token's id",
    "engine.echo.faults.rank": "a rank's number",
    "engine.echo.faults.exitcode": "exits cleanly",
    "engine.echo.faults.seconds": "at once",
    "engine.tp.kv_events": "none are kept",
    "engine.tp.seed": "a seed",
    "transport.zmq.port": "any free one",
    "transport.zmq.linger_s": "what was taken is dropped",
    "transport.zmq.name_timeout_s": "one attempt",
    "transport.nats.linger_s": "what was taken is dropped",
    "transport.redis.linger_s": "what was taken is dropped",
    "transport.redis.db": "the first database",
}
"""Everywhere else zero is as senseless as a negative number."""


def settings_types() -> Iterator[tuple[str, type[Struct]]]:
    """Of every section and every plugin that is installed with the distribution."""
    yield from TABLES.items()
    registry = Registry()
    for section, kind in CHOICES.items():
        for name in registry.names(kind):
            try:
                yield f"{section}.{name}", getattr(registry, kind)(name).settings_type
            except PluginError:  # its driver is not installed
                continue


def numbers(where: str, kind: type[Struct]) -> Iterator[tuple[str, str, bool, tuple[str, ...]]]:
    """Each number below: the section, its key, whether it may have a fraction, and the arrays that it is in."""
    for item in msgspec.structs.fields(kind):
        arms = _arms(item.type)
        if int in arms or float in arms:
            yield where, item.encode_name, float in arms, ()
        for inner in (arm for arm in arms if isinstance(arm, type) and issubclass(arm, Struct)):
            yield from (
                (where, key, fraction, (item.encode_name, *above)) for _, key, fraction, above in numbers("", inner)
            )


def _arms(tp: Any) -> set[Any]:
    if typing.get_origin(tp) is None:
        return {tp}
    if typing.get_origin(tp) is typing.Annotated:
        return _arms(typing.get_args(tp)[0])
    return set().union(*(_arms(inner) for inner in typing.get_args(tp) if inner is not ...))


NUMBERS = [found for where, kind in settings_types() for found in numbers(where, kind)]
TYPES = dict(settings_types())
REQUIRED: dict[str, dict[str, Any]] = {"faults": {"at": "step", "do": "raise"}}


def test_every_room_has_numbers_that_are_looked_at() -> None:
    rooms = {where for where, *_ in NUMBERS}
    assert {"wire", "liveness", "ledger", "frontends", "engine.echo", "transport.inproc", "transport.zmq"} <= rooms


def refused(where: str, key: str, above: tuple[str, ...], value: Any) -> str:
    """What is said of the value."""
    options: dict[str, Any] = {key: value}
    for name in reversed(above):
        options = {name: [REQUIRED.get(name, {}) | options]}
    with pytest.raises(ConfigError) as raised:
        convert_options(TYPES[where], options, where)
    return str(raised.value)


@pytest.mark.parametrize(
    ("where", "key", "fraction", "above"),
    NUMBERS,
    ids=[".".join([where, *above, key]) for where, key, _, above in NUMBERS],
)
def test_a_number_that_can_t_be_meant_is_refused_with_its_key(
    where: str, key: str, fraction: bool, above: tuple[str, ...]
) -> None:
    path = ".".join([where, *above, key])
    zero = [] if path in ZERO_MEANS else [0]
    odd: list[Any] = [-1, -LARGEST, *zero, *([math.nan, math.inf, -math.inf, 1e300] if fraction else [2**64])]
    for value in odd:
        words = refused(where, key, above, value)
        assert words.startswith(where), words
        assert re.search(rf"\b{key}\b", words), words


def test_zero_is_taken_where_it_means_something() -> None:
    for path in ZERO_MEANS:
        where, key, above = next((w, k, a) for w, k, _, a in NUMBERS if ".".join([w, *a, k]) == path)
        options: dict[str, Any] = {key: 0}
        for name in reversed(above):
            options = {name: [REQUIRED.get(name, {}) | options]}
        convert_options(TYPES[where], options, where)
