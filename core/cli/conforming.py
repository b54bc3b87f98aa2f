"""`tllm conformance`: whether a transport, an engine or a launcher keeps what every one of its kind promises."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_core.cli.arguments import add_debug
from tllm_core.errors import ConfigError

if TYPE_CHECKING:
    from tllm_core.conformance.report import Outcome, Report

KINDS = ("transport", "engine", "launcher")
FORMS = (".html", ".json")
RESULT_WIDTH = len("does not apply")


def add_conformance(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm conformance`."""
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", metavar="NAME", help='as it is installed, or "module:Object"')
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of it; may be repeated"
    )
    parser.add_argument(
        "--broker",
        default="",
        metavar="COMMAND",
        help='nats, valkey, or a command with {port} in it, which is started; "{address}" in a setting becomes its host:port',
    )
    parser.add_argument(
        "--suite",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="what else a test file would set, as in --suite ranks=3 or --suite 'lacks=CROSS_HOST|RECONNECTS'",
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="run the cases whose names hold this")
    parser.add_argument("--report", metavar="FILE", help="write a page (.html) or JSON (.json)")
    add_debug(parser)


def conformance(arguments: argparse.Namespace) -> int:
    """Runs the suite and prints what became of each case; 1 where one failed."""
    from tllm_core.conformance.running import Subject, check_extra, run

    target = _target(arguments.report)
    check_extra()
    subject = Subject(
        arguments.kind,
        arguments.name,
        _pairs("--set", arguments.set),
        _pairs("--suite", arguments.suite),
        arguments.broker,
    )
    table = _Table()
    report = run(subject, table.start, table.row, arguments.only)
    _tell_failures(report)
    print(f"\n{report.summary()}")
    if target is not None:
        target.write_bytes(report.to_json() if target.suffix == ".json" else report.to_html().encode())
        print(f"report: {target}")
    return 0 if report.holds else 1


class _Table:
    """One line per case, as it ends; written where standard output was before pytest took it."""

    def __init__(self) -> None:
        self._stream, self._width = sys.stdout, 0

    def start(self, cases: Sequence[str]) -> None:
        self._width = max(map(len, cases), default=0)
        self._print("CASE", "INVARIANTS", "RESULT", "TIME")

    def row(self, outcome: "Outcome") -> None:
        invariants = " ".join(outcome.invariants)
        self._print(outcome.case, invariants, outcome.result, f"{outcome.seconds:.1f} s")

    def _print(self, case: str, invariants: str, result: str, time: str) -> None:
        line = f"{case:{self._width}}  {invariants:10}  {result:{RESULT_WIDTH}}  {time:>8}"
        print(line, file=self._stream, flush=True)


def _tell_failures(report: "Report") -> None:
    for outcome in report.outcomes:
        if outcome.result == "fail":
            print(f"\n{outcome.case}\n  promise   {outcome.promise}\n  means     {outcome.blame}")
            print("  found     " + outcome.words.strip().replace("\n", "\n            "))
    for outcome in report.outcomes:
        if outcome.result == "not checked" or "may be declared" in outcome.words:
            print(f"\n{outcome.result}: {outcome.case}: {outcome.words}")


def _target(text: str | None) -> Path | None:
    if text is None:
        return None
    target = Path(text)
    if target.suffix not in FORMS:
        raise ConfigError(f"--report {text}: must end in {' or '.join(FORMS)}")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--report {text}: there is no directory {target.absolute().parent}")
    return target


def _pairs(flag: str, items: Sequence[str]) -> dict[str, Any]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{flag} {item}: must be KEY=VALUE")
        pairs[key] = _plain(value)
    return pairs


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
