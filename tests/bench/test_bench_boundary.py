"""The boundary benchmark measures what it says, and its numbers are all there."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tllm_core.conformance.broker import nats_server, valkey_server
from tllm_core.errors import ConfigError, TransportError
from tllm_core.plugins.bench import boundary, limits, peer, report, streams

SERVERS = {"nats": nats_server, "redis": valkey_server}


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


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "LATENCY_REQUESTS", 10)
    monkeypatch.setattr(boundary, "RAW_MESSAGES", 100)


SHORT = ("--streams", "8", "--steps", "8", "--repeat", "2", "--json")


@pytest.mark.parametrize(
    ("consumers", "transports"), [("async", "zmq"), ("sync", "zmq"), ("async", "inproc"), ("async", "zmq,inproc")]
)
def test_a_run_has_every_number_and_every_token(
    capsys: pytest.CaptureFixture[str], consumers: str, transports: str
) -> None:
    assert boundary.run(arguments(*SHORT, "--transport", transports, "--consumers", consumers)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] is True
    assert [path for path, number in numbers(found) if not number > 0] == []
    assert list(found["transports"]) == transports.split(",")
    for of in found["transports"].values():
        assert [r["whole"]["tokens"] for r in of["rounds"]] == [64, 64]
        assert of["boundary"].keys() == {
            "tokens_per_s",
            "tokens_per_s_after_submit",
            "updates_per_s",
            "tokens_per_update",
        }
        assert of["limits"].keys() >= {"wakes_per_s", "raw_tokens_per_s", "raw_round_trip_us"}
        assert ("to_zmq" in of["ratios"]) == ("zmq" in transports)
    assert found["versions"]["pyzmq"]
    lines = report.table(found)
    assert lines[0].startswith(f"8 streams of 8 tokens, {consumers} consumers")
    assert lines[1].split() == transports.split(",")
    assert f"every token as expected {'yes ' * len(found['transports'])}".split() in [line.split() for line in lines]


def test_paced_steps_are_measured_beside_those_as_fast_as_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(*SHORT, "--transport", "zmq", "--transport", "inproc", "--step-ms", "10")
    assert boundary.run(given) == 0
    found = json.loads(capsys.readouterr().out)
    for of in found["transports"].values():
        # 8 steps have 7 pauses of 10 ms between them, whatever else the machine does.
        assert [r["paced"]["seconds"] >= 0.06 for r in of["rounds"]] == [True, True]
        assert of["boundary"]["tokens_per_s_paced"] <= 64 / 0.06
        assert of["ratios"]["paced_to_zmq"] > 0
        assert of["single_stream"]["inter_token_us"]["p50"] > 5_000
    assert found["transports"]["zmq"]["ratios"]["paced_to_zmq"] == 1
    assert any("a step every 10 ms" in line for line in report.table(found))


NATS, REDIS = "tllm_core.transports.nats:NatsTransport", "tllm_core.transports.redis:RedisTransport"


def test_brokers_are_measured_beside_zmq_over_servers_started_for_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary.run(arguments(*SHORT, "--transport", f"zmq,{NATS},{REDIS}")) == 0
    out, told = capsys.readouterr()
    found = json.loads(out)["transports"]
    assert {name: of["limits"]["raw_library"] for name, of in found.items()} == {
        "zmq": "pyzmq",
        "nats": "nats-py",
        "redis": "redis-py",
    }
    assert [of["ratios"]["to_zmq"] > 0 for of in found.values()] == [True] * 3
    assert [line.partition(": ")[0] for line in told.splitlines()] == [NATS, REDIS]
    assert found["nats"]["broker"].startswith("started for this run, nats://127.0.0.1:")


def test_a_broker_that_is_named_is_the_one_that_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with nats_server("--user", "bench", "--pass", "word") as server:
        url = server.url.replace("nats://", "nats://bench:word@")
        given = arguments(*SHORT, "--transport", NATS, "--set", f"transport.options.url={url}")
        assert boundary.run(given) == 0
        assert server.monitor("varz")["total_connections"] >= 2
    out, told = capsys.readouterr()
    assert json.loads(out)["transports"]["nats"]["broker"] == "given"
    assert told == ""
    assert "word" not in out


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


@pytest.mark.parametrize("library", ["zmq", "nats", "redis", "inproc"])
def test_each_library_is_measured_over_a_server_of_its_own(library: str) -> None:
    with contextlib.ExitStack() as stack:
        options = {"url": stack.enter_context(SERVERS[library]()).url} if library in SERVERS else {}
        raw = limits.raw(library, options, 3000, 50)
        if library == "redis":
            with redis.Redis.from_url(options["url"]) as client:
                assert client.dbsize() == 0
    assert raw.library == limits.LIBRARIES.get(library, limits.LIBRARIES["zmq"])[1]
    assert raw.messages_per_s > 0
    assert len(raw.round_trips_s) == peer.ROUND_TRIPS
    assert all(trip > 0 for trip in raw.round_trips_s)


def test_a_library_that_is_not_installed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    monkeypatch.delitem(sys.modules, "tllm_core.plugins.bench.raw_nats", raising=False)
    with pytest.raises(ConfigError, match=r"nats is not installed: pip install 'tllm-core\[nats\]'"):
        limits.raw("nats", {"url": "nats://127.0.0.1:1"}, 3000, 50)


def test_the_other_end_that_cannot_start_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TransportError, match="did not start"), peer.peer("tllm_core.plugins.bench.raw_zmq", "nothing"):
        pass
    assert "has no attribute 'nothing'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--transport", ","), "--transport names none"),
        (("--transport", "zmk"), "zmq"),
        (("--set", "transport"), "--set transport: must be SECTION.KEY=VALUE"),
        (("--set", "transport.zmq.url=nats://x"), "url"),
    ],
)
def test_a_choice_that_cannot_be_measured_is_refused_in_words(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        boundary.run(arguments(*SHORT, *given))


@pytest.mark.parametrize(
    "wrong", [("--streams", "0"), ("--consumers", "none"), ("--repeat", "-1"), ("--step-ms", "0"), ("--step-ms", "nan")]
)
def test_wrong_arguments_end_with_the_code_of_wrong_use(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(*wrong)
    assert ended.value.code == 2
