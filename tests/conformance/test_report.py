"""`tllm conformance` and what it tells: a run without a test file, its table, its exit code, its page and its JSON."""

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tllm_core.cli.conforming import _pairs
from tllm_core.conformance.report import Outcome, Report
from tllm_core.conformance.running import Subject, check_extra, module_text
from tllm_core.errors import ConfigError

BROKEN = """
from tllm_core.world.launch import InlineLauncher

class Forgetful(InlineLauncher):
    name = "forgetful"

    def launch(self, spec):
        world = super().launch(spec)
        events = world.events
        world.events = lambda timeout: [event for event in events(timeout) if type(event).__name__ != "Listening"]
        return world
"""


def run(*words: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [] if path is None else [f"sys.path.insert(0, {str(path)!r})"]
    code = "; ".join(["import sys", *paths, "from tllm_core.entry import main", "sys.exit(main())"])
    command = [sys.executable, "-c", code, "conformance", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=cwd, check=False)


def report(**changes: object) -> Report:
    outcomes = [
        Outcome("keeps_order", "pass", 0.5, ("I2",), None, "Order is kept.", "it is not"),
        Outcome("ends", "fail", 1.5, ("I7",), None, "It ends.", "<it hangs>", "assert 1 == 2", "Traceback <here>"),
        Outcome("swims", "not claimed", 0.0, ("I2",), "SWIMS", "It swims.", "feet", "it does not claim SWIMS"),
        Outcome("restarts", "not checked", 0.0, ("I11",), None, "It restarts.", "lost", "no server"),
    ]
    fields = {
        "kind": "transport",
        "name": "pigeon",
        "distribution": "tllm-pigeon",
        "version": "2.0",
        "core_version": "0.1.0",
        "python": "3.11",
        "platform": "Linux",
        "finished_at": "2026-01-01 00:00 UTC",
        "capabilities": ("CROSS_HOST",),
        "outcomes": outcomes,
    }
    return Report(**{**fields, **changes})


class Page(HTMLParser):
    """Checks that tags are balanced, and that nothing is fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.words.append(text)


def test_the_page_is_whole_and_tells_who_what_and_why() -> None:
    words = " ".join(Page(report().to_html()).words)
    for expected in ("transport pigeon", "does not conform", "tllm-pigeon 2.0", "tllm-core 0.1.0", "CROSS_HOST"):
        assert expected in words
    for expected in (
        "It ends.",
        "<it hangs>",
        "assert 1 == 2",
        "Traceback <here>",
        "it does not claim SWIMS",
        "no server",
    ):
        assert expected in words
    assert words.index("It ends.") < words.index("Order is kept."), "what failed comes first"


def test_the_json_holds_every_case_and_the_counts() -> None:
    told = json.loads(report().to_json())
    assert told["counts"] == {"pass": 1, "fail": 1, "not claimed": 1, "not checked": 1}
    assert told["holds"] is False
    assert [case["case"] for case in told["outcomes"]] == ["keeps_order", "ends", "swims", "restarts"]


def test_only_what_was_checked_and_did_not_fail_conforms() -> None:
    outcomes = report().outcomes
    assert not report().holds
    assert report(outcomes=[outcomes[0], outcomes[2]]).holds
    assert not report(outcomes=[outcomes[2], outcomes[3]]).holds
    assert report().summary() == (
        "transport pigeon 2.0 on tllm-core 0.1.0: 1 passed, 1 failed, 1 not claimed, 1 not checked"
    )


@pytest.mark.parametrize(
    "subject",
    [
        Subject("engine", "echo", {"max_seq_len": 64}, {"many_ranks": {"world_size": 2}}),
        Subject("launcher", "spawn"),
        Subject("transport", "zmq", {}, {"lacks": "CROSS_HOST|RECONNECTS", "narrow": {"high_water_frames": 16}}),
        Subject("transport", "pigeon", {"url": "pigeon://{address}", "size": 3}, {}, "pigeond -p {port}"),
        Subject("transport", "nats"),
    ],
    ids=lambda subject: subject.name,
)
def test_the_written_module_is_a_test_file_of_few_lines(subject: Subject) -> None:
    text = module_text(subject)
    assert len(text.splitlines()) <= 11
    found: dict[str, object] = {}
    exec(compile(text, "test_conformance.py", "exec"), found)
    (suite,) = (value for name, value in found.items() if name.startswith("Test"))
    assert getattr(suite, subject.kind) == subject.name
    if subject.name == "pigeon":
        assert suite().settings("host:1") == {"url": "pigeon://host:1", "size": 3}
    if subject.name == "nats":
        assert suite().settings("host:1") == {"url": "nats://host:1"}


def test_settings_are_json_or_text() -> None:
    assert _pairs("--set", ["size=3", "url=tcp://x=y", "many=[1, 2]"]) == {
        "size": 3,
        "url": "tcp://x=y",
        "many": [1, 2],
    }
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        _pairs("--set", ["size"])


def test_what_is_not_installed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'tllm-core[conformance]'")) as caught:
        check_extra()
    assert "\n" not in str(caught.value)


def test_a_launcher_that_conforms(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("raise SystemExit('not asked')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    target = tmp_path / "report.json"
    done = run("launcher", "inline", "--report", str(target), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(target.read_text())
    assert (told["name"], told["distribution"], told["holds"]) == ("inline", "tllm-core", True)
    table = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    for case in told["outcomes"]:
        assert case["result"] in table[case["case"]]
        assert case["promise"]
    assert {path.name for path in tmp_path.iterdir()} == {"conftest.py", "pytest.ini", "report.json"}


def test_a_launcher_that_does_not_conform(tmp_path: Path) -> None:
    (tmp_path / "forgetful_launcher.py").write_text(BROKEN)
    target = tmp_path / "report.html"
    done = run("launcher", "forgetful_launcher:Forgetful", "--report", str(target), "--only", "in_order", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a_start_is_told_in_order" in done.stdout
    assert "promise   Identified, Listening" in done.stdout
    assert "assert" in done.stdout
    Page(target.read_text())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["launcher", "spwan"], "spawn"),
        (["launcher", "inline", "--report", "report.pdf"], ".html or .json"),
        (["engine", "echo", "--set", "x"], "KEY=VALUE"),
        (["boat", "x"], "invalid choice"),
    ],
    ids=["unknown name", "unknown form", "no pair", "unknown kind"],
)
def test_wrong_use_is_told_and_ends_with_2(words: list[str], expected: str) -> None:
    done = run(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_words_that_no_case_holds_are_told_without_a_table() -> None:
    done = run("transport", "inproc", "--only", "zzzz")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "tllm: no case's name holds 'zzzz'; without --only, all are listed as they run\n"
