"""`tllm bench engine --under-pressure` on a tiny model: everything is measured, and what is told of it is true."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tp.conftest import save_tiny_llama, save_tokenizer
from tllm_core.errors import ConfigError
from tllm_core.plugins.bench import engine
from tllm_core.plugins.bench.engine_hardships import HARDSHIPS, PLAIN, Trial, Window, attempt
from tllm_core.plugins.bench.engine_pressure import ONE, TWO, UNCACHED, Chunks, Found, Plan, Round
from tllm_core.plugins.bench.engine_pressure_report import report, table
from tllm_core.plugins.bench.engine_streams import Stream, World, typical_gap_s

SHORT = ("--under-pressure", "--batch", "3", "--prompt-tokens", "9", "--new-tokens", "64", "--rounds", "1")


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    return parser.parse_args(list(given))


def text_model(directory: Path, limit: int) -> str:
    save_tokenizer(save_tiny_llama(directory, max_position_embeddings=limit))
    return str(directory)


def test_a_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = text_model(tmp_path, limit=8192)
    assert engine.run(arguments(*SHORT, "--threads", "2", "--model", model, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["left_out"] == {}
    assert len(told["figures"]) == 5
    for figure in told["figures"]:
        assert figure["value"] > 0
        assert figure["rounds"] == [figure["value"]]
    assert list(told["requests"]) == [hardship.name for hardship in HARDSHIPS]
    for name, of in told["requests"].items():
        assert of["longest_steps"] > 0
        assert ("grammar" in (of["error"] or "")) is (name == "grammar, broken")
    for measured in told["rounds"]:
        assert set(measured["rates"]) == {ONE, UNCACHED, TWO}
        assert len(measured["chunks"]["gaps_s"]) >= 3, "each stream waits for its tokens beside the chunks"
    text = "\n".join(table(told))
    assert "3 streams of 9 + 64 tokens" in text
    assert all(hardship.name in text for hardship in HARDSHIPS)


def test_what_can_not_be_measured_is_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_llama(tmp_path, max_position_embeddings=8192))
    assert engine.run(arguments(*SHORT, "--threads", "1", "--model", model)) == 0
    printed = capsys.readouterr().out
    assert "two ranks: not measured, 1 threads can't be divided" in printed
    assert "guided requests: not measured, the engine has no guided decoding" in printed
    assert "JSON" not in printed


@pytest.mark.parametrize("wrong", [("--batch", "1,8"), ("--compare", "transformers")])
def test_options_of_the_other_measurement_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="--under-pressure takes one number as --batch, and no --compare"):
        engine.run(arguments("--under-pressure", *wrong))


def test_a_model_that_is_too_short_for_it_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = text_model(tmp_path, limit=256)
    with pytest.raises(ConfigError, match="sequences of 4096 tokens are measured, and the model's limit is 256"):
        engine.run(arguments(*SHORT, "--threads", "1", "--model", model))


# ----------------------------------------------------------------------------------------------------- the report


def _trial(own_ms: float, added_ms: float, error: str | None = None) -> Trial:
    alone, beside = 0.010, 0.020
    return Trial(
        alone=Window(None if error else alone + own_ms / 1000, 0.5, error),
        plain_alone=Window(alone, 0.5, None),
        beside=Window(None if error else beside + added_ms / 1000, 3 * beside, error),
        plain_beside=Window(beside, 2 * beside, None),
    )


def _found(*chunk_gaps_s: float) -> Found:
    chunks = Chunks(own_s=0.5, gaps_s=list(chunk_gaps_s), step_s=0.66, decode_s=0.1)
    rates = {ONE: 100.0, UNCACHED: 80.0, TWO: 90.0}
    trials = {PLAIN.name: _trial(0, 0), "slow": _trial(4, 3), "broken": _trial(0, 0, "it can't be used")}
    return Found([Round(chunks, rates, (2.0, 0.2), trials) for _ in range(3)])


def _plan() -> Plan:
    return Plan("m", "float32", "cpu", "auto", 2, 8, 64, 64, 3, say=lambda line: None)


def test_figures_are_ratios_to_what_they_are_named_after() -> None:
    told = report(_plan(), _found(0.6, 0.7, 0.8))
    values = [figure["value"] for figure in told["figures"]]
    assert values == pytest.approx([0.8 / 0.5, 0.66 / 0.6, 100 / 80, 0.1, 0.9])


def test_p99_is_over_all_gaps_of_all_rounds_and_no_single_stray_one() -> None:
    told = report(_plan(), _found(*[0.6] * 199, 5.0))
    assert told["figures"][0]["value"] == pytest.approx(1.2)
    told = report(_plan(), _found(*[0.6] * 97, 5.0, 5.0, 5.0))
    assert told["figures"][0]["value"] == pytest.approx(10.0)


def test_a_request_is_compared_with_a_plain_one_in_its_place() -> None:
    requests = report(_plan(), _found(0.6))["requests"]
    assert requests["slow"] == {
        "own_ms": pytest.approx(4),
        "added_ms": pytest.approx(3),
        "step_ms": pytest.approx(20),
        "longest_steps": pytest.approx(3),
        "error": None,
    }
    assert (requests["broken"]["own_ms"], requests["broken"]["added_ms"]) == (None, None)
    assert requests["broken"]["error"] == "it can't be used"


def test_the_table_says_all_of_it_to_a_stranger() -> None:
    found = _found(0.6)
    found.left_out[TWO] = "one core"
    lines = table(report(_plan(), found))
    assert lines[0] == "m, float32, 8 streams of 64 + 64 tokens, steps of at most 512, 2 threads, 3 rounds"
    assert any(
        line.split()[-5:] == ["0.100", "<=", "0.2", "0.10", "0.10"]
        for line in (line[: line.rfind(" ")] for line in lines)
    )
    assert any(line.split() == ["slow", "+4.00", "ms", "+3.00", "ms", "+15.0%", "3.0", "steps"] for line in lines)
    assert "  broken: it can't be used" in lines
    assert "  two ranks: not measured, one core" in lines


# ------------------------------------------------------------------------------------------------------- streams


class _Told:
    """A result that gives these numbers of tokens, update by update."""

    def __init__(self, *counts: int) -> None:
        self._counts = iter(counts)
        self.outputs: list[Any] = [self]
        self.token_ids_diff: list[int] = []

    def __aiter__(self) -> "_Told":
        return self

    async def __anext__(self) -> "_Told":
        await asyncio.sleep(0)
        count = next(self._counts, None)
        if count is None:
            raise StopAsyncIteration
        self.token_ids_diff = [0] * count
        return self


def _stream(*counts: int) -> Stream:
    return Stream(_Told(*counts))  # type: ignore[arg-type]


def test_gaps_are_those_that_lie_in_it_if_only_partly() -> None:
    async def look() -> list[list[float]]:
        stream = _stream()
        await stream.ended()
        stream.times = [1.0, 2.0, 4.0, 5.0]
        return [stream.gaps(2.5, 3.5), stream.gaps(2.0, 4.0), stream.gaps(1.9, 4.1), stream.gaps(5.0, 9.0)]

    assert asyncio.run(look()) == [[2.0], [2.0], [1.0, 2.0, 1.0], []]


def _came(times: list[float]) -> Stream:
    stream = _stream()
    stream.times = times
    return stream


def test_tokens_that_came_at_once_share_the_time_since_those_before() -> None:
    async def look() -> list[float | None]:
        at_once = _came([2.0] * 24)
        shared = typical_gap_s([_came([1.0, 3.0, 3.0, 3.0, 3.0, 4.0])], 0.0, 9.0)
        return [shared, typical_gap_s([at_once], 2.0, 2.1), typical_gap_s([at_once, _came([1.0, 4.0])], 2.0, 2.1)]

    assert asyncio.run(look()) == [0.5, None, 3.0]


class _AtOnce:
    """A world whose tokens reach the caller all at once, as often as told; after that one second apart."""

    vocab_size = 100

    def __init__(self, times: int) -> None:
        self.left, self.asked = times, list[int]()

    def prompt(self, length: int) -> list[int]:
        return [0] * length

    def ask(self, prompt: list[int], max_tokens: int) -> Stream:
        self.left, apart = self.left - 1, self.left <= 0
        self.asked.append(max_tokens)
        stream = _came([float(apart * i) for i in range(max_tokens)])
        stream.asked_at = 0.0
        return stream


def _attempt(world: _AtOnce) -> tuple[Window, Window]:
    return asyncio.run(attempt(world, PLAIN, [], 24, plain_first=False))  # type: ignore[arg-type]


def _decode(world: _AtOnce) -> float:
    return asyncio.run(World.decode(world, batch=1, prompt_tokens=4, new_tokens=16))  # type: ignore[arg-type]


def test_a_request_whose_tokens_came_at_once_is_measured_again_with_more() -> None:
    world = _AtOnce(2)
    window, _ = _attempt(world)
    assert (window.gap_s, world.asked) == (1.0, [24, 48, 96, 24])


def test_a_machine_too_busy_to_measure_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="96 tokens reached the benchmark all at once, 3 times in a row"):
        _attempt(_AtOnce(3))
    with pytest.raises(ConfigError, match=r"16 tokens reached .* give more with --new-tokens"):
        _decode(_AtOnce(3))
    assert _decode(_AtOnce(2)) == 1.0


def test_every_token_has_its_time_and_a_stream_that_ends_early_is_an_error() -> None:
    async def read() -> None:
        stream = _stream(1, 2, 0, 3)
        await stream.reach(3)
        assert len(stream.times) == 3
        with pytest.raises(ConfigError, match="ended after 6 tokens"):
            await stream.more(4)
        assert stream.times == sorted(stream.times)
        assert await stream.ended() >= stream.times[-1]

    asyncio.run(read())
