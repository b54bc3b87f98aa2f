"""Runs a suite without a test file: writes the few lines that a plugin's author would, and has pytest run them alone."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from tllm_core import __version__
from tllm_core.conformance.report import Outcome, Report, Result
from tllm_core.errors import ConfigError
from tllm_core.registry import Registry, load_object, suggestion
from tllm_core.registry.entries import installed_entries

if TYPE_CHECKING:
    import pytest

Kind = Literal["transport", "engine", "launcher"]
SUITES: dict[Kind, str] = {
    "transport": "TransportConformance",
    "engine": "EngineConformance",
    "launcher": "LauncherConformance",
}
SERVERS = {"nats": "nats_server", "valkey": "valkey_server"}
"""Brokers that have a short name."""
USUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "inproc": ("", {}, {"narrow": {"queue_frames": 16}}),
    "zmq": ("", {}, {"narrow": {"high_water_frames": 16}, "lacks": "CROSS_HOST|RECONNECTS"}),
    "nats": ("nats", {"url": "nats://{address}"}, {"narrow": {"receive_queue_bytes": 1 << 20}}),
    "redis": ("valkey", {"url": "redis://{address}"}, {"narrow": {"queue_frames": 16}}),
}
"""Of the transports that come with tllm-core: broker, settings and attributes, where a person gives none of them. By default
zmq is a socket of this host, which nothing can cut."""
OWN_OPTIONS = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
"""Variables of a person's own test runs that must not change this one."""

OnStart = Callable[[Sequence[str]], None]
OnOutcome = Callable[[Outcome], None]


class Subject(Struct, frozen=True):
    """Who is tested: kind, name or "module:Object". settings: its own. attributes: others of the suite's class.

    broker: a short name of SERVERS, or a command line with {port} in it; its host:port replaces {address} in the settings.
    """

    kind: Kind
    name: str
    settings: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
    broker: str = ""

    def as_usual(self) -> Subject:
        """With what a transport of our own is usually tested with, where nothing is said of it."""
        if self.kind != "transport" or self.settings or self.attributes or self.broker or self.name not in USUAL:
            return self
        broker, settings, attributes = USUAL[self.name]
        return Subject(self.kind, self.name, settings, attributes, broker)


def check_extra() -> None:
    """Raises ConfigError where what the suites need is not installed."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the suites need {' and '.join(missing)}; pip install 'tllm-core[conformance]'")


def module_text(subject: Subject) -> str:
    """The test file that its author would write."""
    subject = subject.as_usual()
    suite = SUITES[subject.kind]
    lines = [f"class Test{suite}({suite}):", f"    {subject.kind} = {subject.name!r}"]
    imports = [suite]
    if subject.broker in SERVERS:
        imports.append(SERVERS[subject.broker])
        lines.append(f"    broker = {SERVERS[subject.broker]}()")
    elif subject.broker:
        imports.append("BrokerProcess")
        lines.append(f"    broker = BrokerProcess({', '.join(map(repr, subject.broker.split()))})")
    if subject.broker:
        lines += ["    def settings(self, address):", f"        return {_with_address(subject.settings)}"]
    elif subject.settings:
        lines.append(f"    settings = {dict(subject.settings)!r}")
    for name, value in subject.attributes.items():
        lines.append(f"    {name} = {_value(name, value, imports)}")
    first = f"from tllm_core.conformance import {', '.join(name for name in imports if name != 'Capability')}"
    more = ["from tllm_core.contracts.interfaces import Capability"] if "Capability" in imports else []
    return "\n".join([first, *more, "", *lines, ""])


def run(subject: Subject, on_start: OnStart, on_outcome: OnOutcome, only: str = "") -> Report:
    """Runs the whole suite in this process. on_start: called with the names of the cases. on_outcome: with each as it ends.
    only: what the names of the cases hold.

    Raises ConfigError or PluginError where the subject can't be had or the suite can't be run on it.
    """
    check_extra()
    capabilities = capabilities_of(subject.kind, subject.name)
    return _report(subject, capabilities, run_module(module_text(subject), on_start, on_outcome, only))


def run_module(text: str, on_start: OnStart, on_outcome: OnOutcome, only: str = "") -> list[Outcome]:
    """Has pytest run the cases of a test file with this text, in this process. Once per process: it is imported by its name.

    The rest as `run`. Raises ConfigError where it can't be run.
    """
    import pytest

    collector = _Collector(on_start, on_outcome)
    with tempfile.TemporaryDirectory(prefix="tllm-") as directory, _alone():
        path = Path(directory, "test_conformance.py")
        path.write_text(text, encoding="utf-8")
        ini = Path(directory, "pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")
        words = [str(path), "-c", str(ini), "--rootdir", directory, "--noconftest", "--import-mode=importlib"]
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            code = pytest.main(
                [*words, "-p", "no:cacheprovider", "-p", "no:doctest", *(["-k", only] if only else [])],
                plugins=[collector],
            )
    if code == pytest.ExitCode.INTERRUPTED and not collector.broken:
        raise KeyboardInterrupt
    if only and code == pytest.ExitCode.NO_TESTS_COLLECTED and not collector.broken:
        close = suggestion(only, collector.left_out)
        raise ConfigError(f"no case's name holds {only!r}{close}; without --only, all are listed as they run")
    if collector.broken or not collector.outcomes:
        raise ConfigError(f"the suite can't be run: {collector.broken or shown.getvalue().strip()}")
    return collector.outcomes


def capabilities_of(kind: Kind, name: str) -> tuple[str, ...]:
    """What it claims; of a launcher what it needs of a transport. Raises PluginError for one that can't be loaded."""
    registry = Registry()
    if kind == "transport":
        flags: Any = registry.transport(name).capabilities
    elif kind == "engine":
        flags = load_object(registry.engine(name).load).capabilities
    else:
        flags = registry.launcher(name).needs
    return tuple(f"{'needs ' if kind == 'launcher' else ''}{flag.name}" for flag in flags)


class _Collector:
    """A pytest plugin that hears what becomes of each case."""

    def __init__(self, on_start: OnStart, on_outcome: OnOutcome) -> None:
        self._on_start, self._on_outcome = on_start, on_outcome
        self._cases: dict[str, Any] = {}
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self.outcomes: list[Outcome] = []
        self.left_out: list[str] = []
        self.broken = ""

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.left_out += [_short(item.nodeid) for item in items]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken = report.longreprtext.strip()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from tllm_core.conformance.case import case_of

        self._cases = {item.nodeid: case_of(getattr(item, "function", None)) for item in session.items}
        if self._cases:
            self._on_start([_short(nodeid) for nodeid in self._cases])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid, []).append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome = _outcome(nodeid, self._cases.get(nodeid), self._reports.pop(nodeid, []))
        self.outcomes.append(outcome)
        self._on_outcome(outcome)


def _outcome(nodeid: str, about: Any, reports: Sequence[pytest.TestReport]) -> Outcome:
    decisive = next((report for report in reports if report.outcome != "passed"), reports[-1])
    result, words = _result(decisive)
    return Outcome(
        case=_short(nodeid),
        result=result,
        seconds=round(sum(report.duration for report in reports), 3),
        invariants=() if about is None else about.invariants,
        needs=None if about is None or about.needs is None else about.needs.name,
        promise="" if about is None else about.promise,
        blame="" if about is None else about.blame,
        words=words,
        details=decisive.longreprtext if result == "fail" else "",
    )


def _result(report: pytest.TestReport) -> tuple[Result, str]:
    if report.passed:
        return "pass", ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return "fail", str(crash.message if crash is not None else report.longreprtext)
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    words = reason.removeprefix("Skipped: ")
    if words.startswith("NOT CHECKED"):
        return "not checked", words.removeprefix("NOT CHECKED: ")
    return ("not claimed" if "does not claim" in words else "does not apply"), words


def _report(subject: Subject, capabilities: tuple[str, ...], outcomes: list[Outcome]) -> Report:
    entries = [entry for entry in installed_entries() if (entry.kind, entry.name) == (subject.kind, subject.name)]
    return Report(
        kind=subject.kind,
        name=subject.name,
        distribution=entries[0].distribution if entries else "",
        version=entries[0].version if entries else "",
        core_version=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        finished_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        capabilities=capabilities,
        outcomes=outcomes,
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the options and plugins of a person's own test runs."""
    before = dict(os.environ)
    for name in OWN_OPTIONS:
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name in (*OWN_OPTIONS, "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _short(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].removeprefix("test_")


def _with_address(settings: Mapping[str, Any]) -> str:
    parts = [
        f"{name!r}: {value!r}.replace('{{address}}', address)" if isinstance(value, str) else f"{name!r}: {value!r}"
        for name, value in settings.items()
    ]
    return f"{{{', '.join(parts)}}}"


def _value(name: str, value: Any, imports: list[str]) -> str:
    if name != "lacks":
        return repr(value)
    imports.append("Capability")
    return " | ".join(f"Capability.{word}" for word in str(value).split("|"))
