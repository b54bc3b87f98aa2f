"""`tllm bench death`: how long it takes until every stream of a frontend hears that its engine is gone.

Each run starts an engine, lets all streams of one frontend begin, and then kills or freezes the engine's process. All places
and signals take turns, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs

from tllm_core.attach import write_attach_file
from tllm_core.errors import ConfigError
from tllm_core.executor import GenerationExecutor
from tllm_core.plugins.bench.contenders import Contender, add_transport_arguments, contenders, names_of, positive
from tllm_core.plugins.bench.crowd import MAX_SEQ_LEN, Crowd, CrowdProcess, Told
from tllm_core.plugins.bench.report import Row, columns, median

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
PLACES = {
    "owner": "the process that started the engine",
    "attached": "a frontend of the same host, which sees the engine's processes",
    "remote": "a frontend that sees none of them, as from another host: it is told over the transport alone",
}
STEP_S = 0.02
SHUTDOWN_S = 5.0


class Case(Struct):
    """One signal, transport and place. woken_ms: one list per run; missing: streams that were not told."""

    transport: str
    signal: str
    place: str
    woken_ms: list[list[float]] = field(default_factory=list)
    missing: int = 0

    def add(self, since: float, told: Sequence[float], streams: int) -> None:
        self.missing += streams - len(told)
        if told:
            self.woken_ms.append(sorted((at - since) * 1000 for at in told))

    def summary(self) -> dict[str, Any]:
        """Of all streams of all runs, and of the last stream of each run, in milliseconds."""
        every = sorted(ms for run in self.woken_ms for ms in run)
        last = [run[-1] for run in self.woken_ms]
        shown: dict[str, Any] = {"transport": self.transport, "signal": self.signal, "place": self.place}
        shown |= {"runs": len(self.woken_ms), "missing": self.missing}
        if every:
            shown["woken_ms"] = {"p50": median(every), "p99": every[round((len(every) - 1) * 0.99)], "max": every[-1]}
            shown["last_ms"] = {"p50": median(last), "max": max(last)}
        return shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tllm bench death`."""
    add_transport_arguments(parser)
    parser.add_argument("--runs", type=positive, default=20, metavar="N", help="deaths of each kind (default: 20)")
    parser.add_argument("--streams", type=positive, default=256, metavar="N", help="of the frontend (default: 256)")
    parser.add_argument(
        "--signals", default="KILL,STOP", metavar="NAMES", help="what the engine gets: KILL, STOP (default: both)"
    )
    places = "; ".join(f"{name}: {text}" for name, text in PLACES.items())
    parser.add_argument(
        "--places", default=",".join(PLACES), metavar="NAMES", help=f"where the streams are (default: all). {places}"
    )
    parser.add_argument("--json", action="store_true", help="print one object with every number")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(launcher="spawn")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; 1 where a stream was not told."""
    report = measure(arguments)
    print(json.dumps(report) if arguments.json else "\n".join(table(report)))
    return 1 if any(case["missing"] for case in report["cases"]) else 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole report as plain data."""
    names = names_of(arguments)
    signals = _listed("--signals", arguments.signals, SIGNALS)
    places = _listed("--places", arguments.places, PLACES)
    with contenders(arguments, names) as chosen:
        cases = [
            (contender, Case(contender.label, name, place))
            for contender in chosen
            for name in signals
            for place in places
        ]
        for number in range(arguments.runs):
            for contender, case in cases:
                _say(f"run {number + 1}/{arguments.runs}: {case.transport}, {case.signal}, {case.place}")
                _die(contender, case, arguments.streams)
    _say("")
    return {
        "benchmark": "death",
        "streams": arguments.streams,
        "runs": arguments.runs,
        "step_us": STEP_S * 1e6,
        "cases": [case.summary() for _, case in cases],
    }


def _die(contender: Contender, case: Case, streams: int) -> None:
    settings = contender.settings(
        {"max_batch_size": streams, "max_seq_len": MAX_SEQ_LEN, "step_interval_s": STEP_S},
    )
    executor = GenerationExecutor.create(settings)
    try:
        engine = executor.health().ranks[0].pid
        with _crowd(executor, contender, case.place, streams) as crowd:
            crowd.wait_begun()
            since = time.monotonic()
            os.kill(engine, SIGNALS[case.signal])
            case.add(since, crowd.wait_told(), streams)
    finally:
        executor.shutdown(SHUTDOWN_S)


@contextlib.contextmanager
def _crowd(executor: GenerationExecutor, contender: Contender, place: str, streams: int) -> Iterator[Told]:
    with tempfile.TemporaryDirectory(prefix="tllm") as directory, contextlib.ExitStack() as stack:
        crowd: Told
        if place == "owner":
            crowd = Crowd(executor, streams)
        else:
            file = Path(directory) / "engine.json"
            content = executor.write_attach_file(file)
            if place == "remote":
                write_attach_file(file, structs.replace(content, host=""))
            crowd = CrowdProcess(file, streams, contender.options)
        stack.callback(crowd.close)
        yield crowd


def table(report: dict[str, Any]) -> list[str]:
    """The report in lines."""
    title = f"{report['streams']} streams of one frontend, {report['runs']} runs; ms until they raise EngineDeadError"
    head = ["p50", "p99", "max", "last of a run, p50", "not told"]
    rows: list[Row] = [("", head), *(_row(case) for case in report["cases"])]
    return [title, *columns(rows)]


def _row(case: dict[str, Any]) -> Row:
    name = f"{case['transport']}, SIG{case['signal']}, {case['place']}"
    if "woken_ms" not in case:
        return name, ["", "", "", "", str(case["missing"])]
    woken = [f"{case['woken_ms'][key]:.1f}" for key in ("p50", "p99", "max")]
    return name, [*woken, f"{case['last_ms']['p50']:.1f}", str(case["missing"])]


def _listed(flag: str, typed: str, known: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in typed.split(",") if name.strip()))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ConfigError(f"{flag} {typed}: must be one or more of {', '.join(known)}, separated by commas")
    return names


def _say(line: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
