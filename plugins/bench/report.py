"""Statistics and the table for people."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in microseconds, of at least one value."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {name: ordered[round(last * part)] * 1e6 for name, part in (("p50", 0.5), ("p99", 0.99))}


def table(report: dict[str, Any]) -> list[str]:
    """The boundary's report in lines."""
    boundary, single, limits, ratios = (report[key] for key in ("boundary", "single_stream", "limits", "ratios"))
    trip, first, between = limits["raw_zmq_round_trip_us"], single["first_token_us"], single["inter_token_us"]
    rows = [
        (
            "tokens/s, submit to last token",
            _count(boundary["tokens_per_s"]),
            _of(ratios["to_wake_limit"], "the wake-up limit"),
        ),
        (
            "tokens/s, all submitted before",
            _count(boundary["tokens_per_s_after_submit"]),
            _of(ratios["after_submit_to_wake_limit"], "the wake-up limit"),
        ),
        ("updates/s", _count(boundary["updates_per_s"]), f"{boundary['tokens_per_update']:.1f} tokens each"),
        ("limit: wake-ups/s in one process", _count(limits["wakes_per_s"]), _waking(report)),
        (
            "limit: raw zmq, tokens/s",
            _count(limits["raw_zmq_tokens_per_s"]),
            f"{_count(limits['raw_zmq_messages_per_s'])} messages/s of {limits['raw_zmq_frame_bytes']} bytes; "
            f"the boundary has {_of(ratios['to_raw_zmq'], 'it')}",
        ),
        (
            "one stream: submit to first token",
            _microseconds(first),
            f"{ratios['first_token_to_round_trip']:.1f} raw round trips",
        ),
        (
            "one stream: between tokens",
            _microseconds(between),
            f"the engine steps every {single['engine_step_us']:.0f} us",
        ),
        ("limit: raw zmq round trip", _microseconds(trip), ""),
        ("every token as expected", "yes" if report["exact"] else "NO", ""),
    ]
    return [_title(report), *(f"  {name:<36} {value:>26}   {note}".rstrip() for name, value, note in rows)]


def _title(report: dict[str, Any]) -> str:
    loop = f" ({report['loop']})" if report["loop"] else ""
    return (
        f"{report['transport']}, {report['launcher']}: {report['streams']} streams of {report['steps']} tokens, "
        f"{report['consumers']} consumers{loop}, {report['cores']} cores, median of {report['repeat']}"
    )


def _waking(report: dict[str, Any]) -> str:
    return "one future per stream and step" if report["consumers"] == "async" else "one lock per stream and step"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _of(ratio: float, limit: str) -> str:
    return f"{ratio:.2f} of {limit}"


def _microseconds(values: dict[str, float]) -> str:
    return f"p50 {values['p50']:.0f} us, p99 {values['p99']:.0f} us"
