"""The death benchmark kills what it says, and counts every stream."""

from __future__ import annotations

import argparse
import json
import threading
from typing import Any

import pytest

from tllm_core import GenerationExecutor
from tllm_core.errors import ConfigError
from tllm_core.plugins.bench import crowd, death


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    death.add_arguments(parser)
    return parser.parse_args(list(given))


def measured(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert death.run(arguments("--runs", "1", "--streams", "16", "--json", *given)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_stream_is_told_of_a_killed_engine_in_every_place(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--signals", "KILL")
    assert [(case["signal"], case["place"]) for case in found["cases"]] == [("KILL", place) for place in death.PLACES]
    for case in found["cases"]:
        assert (case["runs"], case["missing"]) == (1, 0)
        assert (
            0 < case["woken_ms"]["p50"] <= case["woken_ms"]["p99"] <= case["woken_ms"]["max"] == case["last_ms"]["max"]
        )
    lines = death.table(found)
    assert lines[0].startswith("16 streams of one frontend, 1 runs")
    assert [line.split()[:3] for line in lines[2:]] == [["zmq,", "SIGKILL,", place] for place in death.PLACES]


def test_a_frontend_that_sees_no_process_is_told_over_the_broker(capsys: pytest.CaptureFixture[str]) -> None:
    nats = "tllm_core.transports.nats:NatsTransport"
    found = measured(capsys, "--transport", nats, "--signals", "KILL", "--places", "remote")
    assert [(case["transport"], case["missing"]) for case in found["cases"]] == [("nats", 0)]


def test_a_frozen_engine_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--signals", "STOP", "--places", "owner")
    assert [(case["signal"], case["place"], case["missing"]) for case in found["cases"]] == [("STOP", "owner", 0)]


def test_a_stream_that_was_not_told_is_counted() -> None:
    case = death.Case("zmq", "KILL", "owner")
    case.add(10.0, [10.5, 10.25], 3)
    assert case.woken_ms == [[250.0, 500.0]]
    assert case.summary()["missing"] == 1
    case.add(10.0, [], 3)
    shown = case.summary()
    assert (shown["runs"], shown["missing"], shown["woken_ms"]["max"]) == (1, 4, 500.0)


def test_a_stream_that_ends_in_another_way_is_not_one_that_was_told() -> None:
    with GenerationExecutor.create(
        engine="echo", transport="inproc", engine_options={"step_interval_s": 0.01}
    ) as executor:
        streams = crowd.Crowd(executor, 16, max_tokens=2)
        streams.wait_begun()
        assert streams.wait_told() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bench-")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--signals", "TERM"), "--signals TERM: must be one or more of KILL, STOP"),
        (("--places", ""), "--places : must be one or more of owner"),
        (("--transport", "inproc"), "inproc"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        death.run(arguments("--runs", "1", *given))
