"""Plugins in child processes: imported once in each process that needs them, and in no other."""

import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens
from tllm_core.registry import Registry

Install = Callable[..., Path]

NOTE = """
import os
with open({file!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{__name__}}\\n")
"""
PLUGIN = """
from tllm_core.contracts.hookspecs import hookimpl

@hookimpl
def tllm_admit(in_flight):
    return "full" if in_flight > 8 else None
"""
SPEC = """
from tllm_core.contracts.interfaces import EngineSpec
from tllm_core.engines.echo import EchoSettings
SPEC = EngineSpec(name="acme", settings_type=EchoSettings, load="acme_engine:Engine")
"""
ENGINE = """
from tllm_core.engines.echo.engine import EchoEngine
class Engine(EchoEngine): pass
"""


@pytest.fixture
def imports(install: Install, tmp_path: Path) -> Callable[[], Counter[tuple[int, str]]]:
    """An engine and a plugin that note their imports; how often each was imported in which process."""
    file = tmp_path / "imports.txt"
    note = NOTE.format(file=str(file))
    install("acme-spec", "acme_spec", note + SPEC, {"engine acme": "acme_spec:SPEC"})
    install("acme-engine", "acme_engine", note + ENGINE, {})
    install("acme-guard", "acme_guard", note + PLUGIN, {"plugin guard": "acme_guard", "plugin same": "acme_guard"})
    (tmp_path / "tllm.toml").write_text("[plugins]\nenable = ['guard', 'guard', 'same', 'acme_guard:']\n")

    def read() -> Counter[tuple[int, str]]:
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter((int(pid), name) for pid, _, name in (line.partition(" ") for line in lines))

    return read


def answers(guarded: Registry) -> list[Any]:
    """What the guard says; more than one answer would be of a plugin that is there more than once."""
    guarded.plugin("guard")
    guarded.plugin("same")
    implementations = guarded.hooks.tllm_admit.get_hookimpls()
    return [implementation.function(9) for implementation in implementations]


def in_child(path: str, results: Any) -> None:
    sys.path.insert(0, path)
    guarded = Registry(path=[path], environ={})
    results.send((os.getpid(), answers(guarded), answers(Registry(path=[path], environ={}))))


@pytest.mark.parametrize(("method", "pids"), [("fork", ["parent"]), ("spawn", ["parent", "child"])])
def test_a_child_process_has_each_plugin_once_and_imports_it_only_where_it_must(
    imports: Callable[[], Counter[tuple[int, str]]], tmp_path: Path, method: str, pids: list[str]
) -> None:
    assert answers(Registry(path=[str(tmp_path)], environ={})) == ["full"]
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(str(tmp_path), theirs))
    child.start()
    assert ours.poll(60)
    pid, first, second = ours.recv()
    child.join(60)
    assert (first, second) == (["full"], ["full"])
    named = {"parent": os.getpid(), "child": pid}
    assert imports() == {(named[who], "acme_guard"): 1 for who in pids}


def test_a_fork_is_not_held_up_by_a_thread_that_it_doesn_t_have(
    imports: Callable[[], Counter[tuple[int, str]]], tmp_path: Path
) -> None:
    guarded = Registry(path=[str(tmp_path)], environ={})
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with guarded._lock:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(answers(guarded)))
    child.start()
    try:
        assert ours.poll(30), "the child waits for a lock that nobody holds"
        assert ours.recv() == ["full"]
    finally:
        release.set()
        holder.join()
        child.kill()
        child.join()


def test_an_engine_world_imports_the_engine_in_its_rank_and_plugins_in_the_frontend_only(
    imports: Callable[[], Counter[tuple[int, str]]], tmp_path: Path
) -> None:
    with GenerationExecutor.create(str(tmp_path / "tllm.toml"), engine="acme", launcher="spawn") as executor:
        (rank,) = (identity.pid for identity in executor._frontend.ranks)
        result = executor.generate([1, 2, 3], SamplingParams(max_tokens=4))
        assert list(result.outputs[0].token_ids) == list(expected_tokens((1, 2, 3), 4))
    counted = imports()
    assert set(counted.values()) == {1}
    assert {pid for pid, name in counted if name == "acme_guard"} == {os.getpid()}
    assert {pid for pid, name in counted if name == "acme_engine"} == {rank}


def test_a_disabled_plugin_is_disabled_in_the_children_too(
    imports: Callable[[], Counter[tuple[int, str]]], install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-twin", "acme_twin", "raise SystemExit('never')", {"engine acme": "acme_twin:SPEC"})
    monkeypatch.setenv("TLLM_DISABLE_PLUGINS", "acme-twin")
    with GenerationExecutor.create(engine="acme", launcher="spawn") as executor:
        assert len(executor.generate([1, 2, 3], SamplingParams(max_tokens=4)).outputs[0].token_ids) == 4
    assert set(imports().values()) == {1}
