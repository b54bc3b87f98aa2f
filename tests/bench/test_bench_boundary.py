"""The boundary benchmark measures what it says, and its numbers are all there."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tllm_core.plugins.bench import boundary, limits, report, streams


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    boundary.add_arguments(parser)
    return parser.parse_args(list(given))


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from numbers(item, f"{path}[{at}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


@pytest.mark.parametrize(
    ("consumers", "places"),
    [("async", ("zmq", "spawn")), ("sync", ("zmq", "spawn")), ("async", ("inproc", "inline"))],
)
def test_a_run_has_every_number_and_every_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, consumers: str, places: tuple[str, str]
) -> None:
    monkeypatch.setattr(boundary, "LATENCY_REQUESTS", 10)
    monkeypatch.setattr(boundary, "RAW_MESSAGES", 100)
    transport, launcher = places
    given = arguments(
        *("--transport", transport, "--launcher", launcher, "--streams", "8", "--steps", "8", "--repeat", "2"),
        *("--consumers", consumers, "--json"),
    )
    assert boundary.run(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] is True
    assert [path for path, number in numbers(found) if not number > 0] == []
    assert [r["whole"]["tokens"] for r in found["rounds"]] == [64, 64]
    assert found["boundary"].keys() >= {"tokens_per_s", "tokens_per_s_after_submit"}
    assert found["limits"].keys() >= {"wakes_per_s", "raw_zmq_tokens_per_s", "raw_zmq_round_trip_us"}
    assert found["versions"]["pyzmq"]
    lines = report.table(found)
    assert lines[0].startswith(f"{transport}, {launcher}: 8 streams of 8 tokens, {consumers} consumers")
    assert lines[-1].split() == ["every", "token", "as", "expected", "yes"]


def test_a_wrong_lost_or_repeated_token_is_found() -> None:
    work = streams.Workload.of(2, 3)
    first, second = work.expected
    assert streams.Delivery.of(1.0, [first, second], 6, work).exact
    for wrong in ([first, second[:-1]], [second, first], [first, [*second, second[-1]]]):
        assert not streams.Delivery.of(1.0, wrong, 6, work).exact


def test_tokens_of_one_update_share_the_time_since_the_last() -> None:
    latency = streams.Latency()
    latency.add(1.0, [(1.5, 1), (2.5, 2), (2.75, 1)])
    assert latency.first_s == [0.5]
    assert latency.between_s == [0.5, 0.5, 0.25]


def test_each_limit_counts_every_wake_and_message() -> None:
    assert asyncio.run(limits.async_wakes_per_s(4, 5)) > 0
    assert limits.sync_wakes_per_s(4, 5) > 0
    raw = limits.raw_zmq(3000, 50)
    assert raw.messages_per_s > 0
    assert len(raw.round_trips_s) == limits.ROUND_TRIPS
    assert all(trip > 0 for trip in raw.round_trips_s)


@pytest.mark.parametrize("wrong", [("--streams", "0"), ("--consumers", "none"), ("--repeat", "-1")])
def test_wrong_arguments_end_with_the_code_of_wrong_use(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(*wrong)
    assert ended.value.code == 2
