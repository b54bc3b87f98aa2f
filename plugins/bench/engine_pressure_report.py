"""What was found under pressure, as plain data and as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from tllm_core.plugins.bench.engine_hardships import Trial
from tllm_core.plugins.bench.engine_pressure import ONE, TWO, UNCACHED, Found, Plan, Round
from tllm_core.plugins.bench.report import Row, columns, median


class Figure(Struct, frozen=True):
    """A ratio, and what is wanted of it. value: of all rounds; rounds: each one's own."""

    name: str
    value: float
    wanted: str
    rounds: list[float]


def report(plan: Plan, found: Found) -> dict[str, Any]:
    """`figures`: see Figure. `requests`: of each kind the medians over the rounds, None where it ended before it decoded."""
    return {
        "benchmark": "engine under pressure",
        "plan": {name: getattr(plan, name) for name in plan.__struct_fields__ if name != "say"},
        "figures": [to_builtins(figure) for figure in _figures(plan, found.rounds)],
        "requests": {name: _request([r.trials[name] for r in found.rounds]) for name in found.rounds[0].trials},
        "left_out": found.left_out,
        "rounds": to_builtins(found.rounds),
    }


def table(told: dict[str, Any]) -> list[str]:
    """A report in lines."""
    return [_title(told["plan"]), *columns([*_figure_rows(told)]), "", *columns([*_request_rows(told)]), *_notes(told)]


def _figures(plan: Plan, rounds: Sequence[Round]) -> Iterator[Figure]:
    waits = [[gap / r.chunks.own_s for gap in r.chunks.gaps_s] for r in rounds]
    yield Figure(
        f"between tokens beside a prompt of {plan.chunks} chunks, p99: to a chunk's own step",
        _p99([wait for of in waits for wait in of]),
        "< 2",
        [_p99(of) for of in waits],
    )
    yield _medians(
        "  step of a chunk and streams: to both steps alone",
        "",
        rounds,
        lambda r: r.chunks.step_s / (r.chunks.own_s + r.chunks.decode_s),
    )
    yield _medians(
        "decode with the prefix cache: to without", ">= 0.95", rounds, lambda r: r.rates[ONE] / r.rates[UNCACHED]
    )
    yield _medians(
        f"first token of {plan.prefix_tokens} tokens seen before: to unseen",
        "<= 0.2",
        rounds,
        lambda r: r.first_s[1] / r.first_s[0],
    )
    if TWO in rounds[0].rates:
        yield _medians(
            "decode with two ranks: to one on the same cores", ">= 0.8", rounds, lambda r: r.rates[TWO] / r.rates[ONE]
        )


def _medians(name: str, wanted: str, rounds: Sequence[Round], of: Callable[[Round], float]) -> Figure:
    values = [of(r) for r in rounds]
    return Figure(name, median(values), wanted, values)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[round((len(values) - 1) * 0.99)]


def _request(trials: Sequence[Trial]) -> dict[str, Any]:
    """own_ms: what its token takes longer than a plain one's, alone. added_ms: what each token beside it takes longer
    than beside a plain one. step_ms: of these. longest_steps: the longest wait of a stream from its arrival on, in such steps."""
    own, added = [t.own_s for t in trials], [t.added_s for t in trials]
    steps = [t.plain_beside.gap_s or 0.0 for t in trials]
    return {
        "own_ms": _ms(own),
        "added_ms": _ms(added),
        "step_ms": _ms(steps),
        "longest_steps": median(t.beside.longest_s / step for t, step in zip(trials, steps, strict=True)),
        "error": next((t.beside.error for t in trials if t.beside.error is not None), None),
    }


def _ms(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return 1000 * median(known) if known else None


# ------------------------------------------------------------------------------------------------------- the tables


def _title(plan: dict[str, Any]) -> str:
    return (
        f"{plan['model']}, {plan['dtype']}, {plan['streams']} streams of {plan['prompt_tokens']} + {plan['new_tokens']} tokens,"
        f" steps of at most {plan['chunk_tokens']}, {plan['threads']} threads, {plan['rounds']} rounds"
    )


def _figure_rows(told: dict[str, Any]) -> Iterator[Row]:
    yield "ratios, each of one round", ["median", "wanted", "rounds"]
    for figure in told["figures"]:
        rounds = " ".join(f"{value:.2f}" for value in sorted(figure["rounds"]))
        yield figure["name"], [f"{figure['value']:.3f}", figure["wanted"], rounds]


def _request_rows(told: dict[str, Any]) -> Iterator[Row]:
    yield f"one request beside {told['plan']['streams']} streams", ["own", "added", "of a step", "longest wait"]
    for name, of in told["requests"].items():
        if of["own_ms"] is None or of["added_ms"] is None:
            cells = ["-", "-", "-"]
        else:
            share = of["added_ms"] / of["step_ms"]
            cells = [f"{of['own_ms']:+.2f} ms", f"{of['added_ms']:+.2f} ms", f"{share:+.1%}"]
        yield name, [*cells, f"{of['longest_steps']:.1f} steps"]


def _notes(told: dict[str, Any]) -> Iterator[str]:
    yield "  own: how much longer its token takes than a plain one's where nothing else runs; added: how much longer the streams'"
    yield "  tokens take than beside a plain one; longest wait: of the streams, from its arrival to its end. Medians."
    for name, of in told["requests"].items():
        if of["error"] is not None:
            yield f"  {name}: {of['error'].splitlines()[0]}"
    for name, reason in told["left_out"].items():
        yield f"  {name}: not measured, {reason}"
