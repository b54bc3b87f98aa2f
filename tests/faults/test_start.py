"""A start that fails: `create` raises promptly with rank, cause and the child's last words, and no process survives."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Trace, Worlds
from tllm_core import EngineStartError

RAISE = {"do": "raise", "message": "bad knob 17"}


def fails(worlds: Worlds, *args: Any, **options: Any) -> EngineStartError:
    with pytest.raises(EngineStartError) as caught:
        worlds(*args, **options)
    assert worlds.started == []
    return caught.value


@pytest.fixture
def engine_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes the module of an engine that no entry point names; returns how it is chosen."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(body: str) -> str:
        (tmp_path / "strange_spec.py").write_text(
            "from msgspec import Struct\n"
            "from tllm_core.contracts.interfaces import EngineSpec\n"
            "class Settings(Struct): pass\n"
            "SPEC = EngineSpec(name='strange', settings_type=Settings, load='strange:StrangeEngine')\n"
        )
        header = "import os, sys\nfrom tllm_core.contracts.interfaces import Engine\n"
        (tmp_path / "strange.py").write_text(header + textwrap.dedent(body))
        return "strange_spec:SPEC"

    return write


@pytest.mark.parametrize("at", ["construct", "prepare", "start"])
def test_an_exception_in_rank_0_says_where_and_what(anywhere: Worlds, trace: Trace, at: str) -> None:
    error = fails(anywhere, faults=[{"at": at, **RAISE}])
    assert "RuntimeError: bad knob 17" in str(error)
    cause = error.root_cause
    assert (cause.rank, cause.kind) == (0, "RuntimeError")
    assert "Traceback (most recent call last)" in (cause.traceback or "")
    assert trace.processes() == {}


def test_an_exception_in_rank_1_is_rank_1s(spawned: Worlds, trace: Trace) -> None:
    error = fails(spawned, world_size=2, faults=[{"at": "start", "rank": 1, **RAISE}])
    assert error.root_cause.rank == 1
    assert "bad knob 17" in (error.root_cause.traceback or "")
    assert trace.processes() == {}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "words", "exitcode"),
    [
        ({"do": "exit"}, "exited with code 3", 3),
        ({"do": "exit", "exitcode": 0}, "exited with code 0", 0),
        ({"do": "kill"}, "was killed by SIGKILL", -9),
    ],
    ids=["exit 3", "exit 0", "SIGKILL"],
)
def test_a_hard_end_while_loading_names_rank_and_exit(
    spawned_ipc: Worlds, trace: Trace, fault: dict[str, Any], words: str, exitcode: int, rank: int
) -> None:
    error = fails(spawned_ipc, world_size=2, faults=[{"at": "start", "rank": rank, **fault}])
    assert f"engine rank {rank} {words}" in str(error)
    assert (error.root_cause.rank, error.root_cause.exitcode) == (rank, exitcode)
    assert trace.processes() == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_gets_ready_is_given_up_by_name_of_its_phase(
    spawned_ipc: Worlds, trace: Trace, rank: int
) -> None:
    error = fails(
        spawned_ipc,
        world_size=2,
        launcher_options={"ready_timeout_s": 4.0},
        faults=[{"at": "start", "do": "hang", "rank": rank}],
    )
    assert "not ready within 4 s (ready_timeout_s)" in str(error)
    assert trace.processes() == {}


def test_the_phase_that_took_too_long_is_named(spawned_ipc: Worlds) -> None:
    error = fails(spawned_ipc, launcher_options={"ready_timeout_s": 4.0}, load_delay_s=600)
    assert "rank 0 has been 'loading echo weights'" in str(error)


def test_a_module_that_cannot_be_imported_is_named(spawned_ipc: Worlds, engine_module: Any, trace: Trace) -> None:
    error = fails(spawned_ipc, engine_module("import module_that_is_not_there"))
    assert "module_that_is_not_there" in str(error)
    assert error.root_cause.rank == 0
    assert trace.processes() == {}


def test_a_class_that_lacks_what_an_engine_must_do_is_named(
    anywhere: Worlds, engine_module: Any, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = _of_fresh_module(anywhere, engine_module("class StrangeEngine(Engine): pass"), monkeypatch)
    assert "StrangeEngine" in str(error)
    assert "step" in str(error)
    assert trace.processes() == {}


def test_the_end_of_stderr_is_shown_where_nothing_else_was_said(
    spawned_ipc: Worlds, engine_module: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    error = fails(spawned_ipc, engine_module("os.write(2, b'out of cards\\n'); os._exit(4)"))
    assert "rank 0 exited with code 4" in str(error)
    assert "out of cards" in str(error)
    assert (error.root_cause.stderr_tail or "").endswith("out of cards\n")
    capfd.readouterr()


def test_a_message_of_any_length_is_told_by_its_beginning_and_end(
    anywhere: Worlds, engine_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = """
        class StrangeEngine(Engine):
            def submit(self, request): pass
            def abort(self, request_id): pass
            def step(self): pass
            def start(self, context):
                raise ValueError("begins " + "x" * 10_000_000 + " ends")
        """
    error = _of_fresh_module(anywhere, engine_module(engine), monkeypatch)
    message = error.root_cause.message
    assert message.startswith("ValueError: begins xxx")
    assert message.endswith("xxx ends")
    assert f"[... {len('ValueError: begins  ends') + 10_000_000 - 8192} characters are left out ...]" in message
    assert "in start" in (error.root_cause.traceback or "")
    assert len(str(error)) < 50_000


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            "def __str__(self): raise KeyError('no words')",
            "Odd: <what it says can't be had: its __str__ raised KeyError>",
        ),
        ("def __str__(self): return 5", "Odd: <what it says can't be had: its __str__ raised TypeError>"),
        ("def __str__(self): return 'a \\udce4 b'", r"Odd: a \udce4 b"),
    ],
    ids=["raises", "is no text", "can't be encoded"],
)
def test_an_exception_that_cannot_be_said_is_told_by_its_type(
    anywhere: Worlds, engine_module: Any, monkeypatch: pytest.MonkeyPatch, odd: str, words: str
) -> None:
    engine = f"""
        class Odd(Exception):
            {odd}
        class StrangeEngine(Engine):
            def submit(self, request): pass
            def abort(self, request_id): pass
            def step(self): pass
            def start(self, context):
                raise Odd
        """
    error = _of_fresh_module(anywhere, engine_module(engine), monkeypatch)
    assert (error.root_cause.message, error.root_cause.kind) == (words, "Odd")
    assert "in start" in (error.root_cause.traceback or "")


def _of_fresh_module(worlds: Worlds, engine: str, monkeypatch: pytest.MonkeyPatch) -> EngineStartError:
    """An inline world imports into this process, where the module of another test may be."""
    for name in ("strange", "strange_spec"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        return fails(worlds, engine)
    finally:
        for name in ("strange", "strange_spec"):
            monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("python", "words"),
    [("/nowhere/python", "/nowhere/python"), ("/etc/passwd", "/etc/passwd"), ("/bin/false", "exited with code 1")],
)
def test_an_interpreter_that_is_none_is_named(spawned_ipc: Worlds, trace: Trace, python: str, words: str) -> None:
    error = fails(spawned_ipc, launcher_options={"python": python})
    assert words in str(error)
    assert trace.processes() == {}


def test_the_next_start_after_a_failed_one_works(anywhere: Worlds) -> None:
    fails(anywhere, faults=[{"at": "start", **RAISE}])
    assert anywhere().generate([1]).finished  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('faults=[{"at": "start", "do": "raise", "message": "bad knob 17"}]', "bad knob 17"),
        ('faults=[{"at": "start", "do": "kill", "rank": 1}], world_size=2', "rank 1 was killed by SIGKILL"),
        ('load_delay_s=600, launcher_options={"ready_timeout_s": 3.0}', "ready_timeout_s"),
    ],
    ids=["exception", "SIGKILL", "too slow"],
)
def test_the_interpreter_exits_by_itself(script: Callable[[str], Any], trace: Trace, options: str, words: str) -> None:
    run = script(f"create({options})")
    assert run.wait() == 1
    assert "EngineStartError" in run.stderr()
    assert words in run.stderr()
    assert trace.processes() == {}
