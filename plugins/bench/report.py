"""Statistics, and the tables for people."""

import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = tuple[str, list[str]]
"""What it is, and a cell for each transport."""


def usable_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in microseconds, of at least one value."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {name: ordered[round(last * part)] * 1e6 for name, part in (("p50", 0.5), ("p99", 0.99))}


def table(report: dict[str, Any]) -> list[str]:
    """The boundary's report in lines: a column for each transport."""
    found = report["transports"]
    rows: list[Row] = [("", list(found)), *_rows(report, list(found.values()))]
    return [_title(report), *columns(rows), *_notes(found)]


def columns(rows: Sequence[Row]) -> list[str]:
    """Rows of any table, each cell as wide as the widest of its column."""
    widths = [max(len(cells[at]) for _, cells in rows) + 2 for at in range(len(rows[0][1]))]
    return ["  " + _line(*row, widths) for row in rows]


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"{name:<44}{''.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))}".rstrip()


def _rows(report: dict[str, Any], found: list[dict[str, Any]]) -> Iterator[Row]:
    def cells(group: str, key: str, show: Any) -> list[str]:
        return [show(of[group][key]) if key in of[group] else "" for of in found]

    several = len(found) > 1 and "to_zmq" in found[0]["ratios"]
    yield "tokens/s, submit to last token", cells("boundary", "tokens_per_s", _count)
    yield "  to the wake-up limit", cells("ratios", "to_wake_limit", _ratio)
    if several:
        yield "  to zmq in this run", cells("ratios", "to_zmq", _ratio)
    yield "tokens/s, all submitted before", cells("boundary", "tokens_per_s_after_submit", _count)
    yield "  to the wake-up limit", cells("ratios", "after_submit_to_wake_limit", _ratio)
    if report["step_ms"] is not None:
        yield f"tokens/s, a step every {report['step_ms']:g} ms", cells("boundary", "tokens_per_s_paced", _count)
        if several:
            yield "  to zmq in this run", cells("ratios", "paced_to_zmq", _ratio)
    yield "updates/s", cells("boundary", "updates_per_s", _count)
    yield "  tokens in each", cells("boundary", "tokens_per_update", lambda value: f"{value:.1f}")
    yield "limit: wake-ups/s in one process", cells("limits", "wakes_per_s", _count)
    yield "limit: raw library, tokens/s", cells("limits", "raw_tokens_per_s", _count)
    yield "  the boundary to it", cells("ratios", "to_raw", _ratio)
    yield "one stream: submit to first token, p50 (p99)", cells("single_stream", "first_token_us", _microseconds)
    yield "limit: raw round trip, p50 (p99)", cells("limits", "raw_round_trip_us", _microseconds)
    yield "  first token to it, p50", cells("ratios", "first_token_to_round_trip", _ratio)
    yield (
        f"between tokens, a step every {report['step_us']:.0f} us",
        cells("single_stream", "inter_token_us", _microseconds),
    )
    yield "every token as expected", ["yes" if of["exact"] else "NO" for of in found]


def _title(report: dict[str, Any]) -> str:
    loop = f" ({report['loop']})" if report["loop"] else ""
    waking = "one future per stream and step" if report["consumers"] == "async" else "one lock per stream and step"
    return (
        f"{report['streams']} streams of {report['steps']} tokens, {report['consumers']} consumers{loop}, "
        f"{report['cores']} cores, median of {report['repeat']}; a wake-up is {waking}"
    )


def _notes(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, of in found.items():
        limits, broker = of["limits"], f"; broker {of['broker']}" if of["broker"] else ""
        messages = f"{_count(limits['raw_messages_per_s'])} messages/s of {limits['raw_frame_bytes']} bytes"
        yield f"  {name}: raw is {limits['raw_library']}, {messages}{broker}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _microseconds(values: dict[str, float]) -> str:
    return f"{values['p50']:.0f} us ({values['p99']:.0f})"
