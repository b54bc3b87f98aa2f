"""`tllm plugins` names every plugin that can't be used, with its cause, and never fails itself."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tllm_core.errors import PluginError
from tllm_core.registry import Found, Registry

Install = Callable[..., Path]

GUARD = """
from tllm_core.contracts.hookspecs import hookimpl

class Guard:
    @hookimpl
    def tllm_admit(self, in_flight):
        return "full" if in_flight > 8 else None

GUARD = Guard()
"""
HOOK = "from tllm_core.contracts.hookspecs import hookimpl\n"


def found(tmp_path: Path, **environ: str) -> dict[str, Found]:
    return {item.name: item for item in Registry(path=[str(tmp_path)], environ=environ).found()}


@pytest.mark.parametrize(
    ("code", "value", "cause"),
    [
        ("raise ImportError('no libgpu.so')", "x", "ImportError: no libgpu.so"),
        ("import sys; sys.exit(3)", "x", "SystemExit: 3"),
        ("raise BaseException('odd')", "x", "BaseException: odd"),
        ("raise GeneratorExit", "x", "GeneratorExit"),
        ("raise RuntimeError('two\\n  lines')", "x", "RuntimeError: two lines"),
        ("class E(Exception):\n    __str__ = None\nraise E", "x", "E"),
        ("def f():\n    f()\nf()", "x", "RecursionError"),
        ("", "no such module!", "there is no module 'no such module!'"),
        ("", "x.gone", "there is no module 'x.gone'"),
        ("", "x:gone", "AttributeError: module 'x' has no attribute 'gone'"),
        ("", ".x", "TypeError"),
        ("GUARD = 5", "x:GUARD", "must be a module or an object whose methods are hooks, not 5"),
        ("GUARD = None", "x:GUARD", "must be a module or an object whose methods are hooks, not None"),
        ("def tllm_admit(): pass", "x:tllm_admit", "must be a module or an object whose methods are hooks, not <function"),
        ("class G:\n    __eq__ = object.__eq__\n    __hash__ = None\nGUARD = G()", "x:GUARD", "a G can't be hashed"),
        ("class G:\n    @property\n    def tllm_admit(self): return 1 / 0\nGUARD = G()", "x:GUARD", "ZeroDivisionError"),
        (GUARD, "x:Guard", "tllm_admit takes self, and Guard is a class; name an instance"),
        ("def tllm_admit(request): return 'no'", "x", "tllm_admit is not marked with @hookimpl"),
        (HOOK + "@hookimpl\ndef tllm_admit(requst): pass", "x", "tllm_admit has no argument 'requst' (did you mean 'requ"),
        (HOOK + "@hookimpl\ndef tllm_admitt(request): pass", "x", "unknown hook 'tllm_admitt' (did you mean 'tllm_admit'?)"),
        (HOOK + "@hookimpl(wrapper=True)\ndef tllm_admit(request): yield", "x", "tllm_admit is a hook wrapper"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_plugin_is_said_and_its_neighbour_works(
    install: Install, tmp_path: Path, code: str, value: str, cause: str
) -> None:
    install("acme-bad", "x", code, {"plugin bad": value}, version="2.3")
    install("acme-guard", "guard", GUARD, {"plugin guard": "guard:GUARD"})
    told = found(tmp_path)
    assert (told["guard"].status, told["guard"].detail) == ("ok", "")
    assert (told["bad"].status, told["bad"].distribution, told["bad"].version) == ("broken", "acme-bad", "2.3")
    assert cause in told["bad"].detail
    registry = Registry(path=[str(tmp_path)], environ={})
    with pytest.raises(PluginError, match=r"acme-bad 2\.3"):
        registry.plugin("bad")
    registry.plugin("guard")
    assert registry.hooks.tllm_admit(request=None, in_flight=9) == "full"


def test_a_reference_to_what_can_t_even_be_looked_at_is_a_plugin_error(install: Install, tmp_path: Path) -> None:
    install("acme-odd", "odd", "class T(type):\n    def __repr__(self): return 1 / 0\nX = T('X', (), {})", {})
    with pytest.raises(PluginError, match="transport 'odd:X' is broken: ZeroDivisionError"):
        Registry(path=[str(tmp_path)], environ={}).transport("odd:X")


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("print('Welcome to\\nACME!')", "it prints when it is imported: 'Welcome to ACME!'"),
        ("import sys; sys.stdout.buffer.write(b'raw\\xff')", "it prints when it is imported: 'raw\ufffd'"),
        ("import sys; sys.stdout.reconfigure(encoding='latin-1')", ""),
        ("import sys; sys.stdout.close()", ""),
        ("import sys; sys.stdout = None", ""),
        ("print('x' * 1000)", f"it prints when it is imported: '{'x' * 80}...'"),
    ],
)
def test_a_plugin_that_prints_is_named_works_and_leaves_standard_output_clean(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, detail: str
) -> None:
    install("acme-loud", "loud", f"{code}\n{GUARD}", {"plugin loud": "loud:GUARD"})
    told = found(tmp_path)["loud"]
    print("mine")
    assert (told.status, told.detail) == ("ok", detail)
    assert capsys.readouterr().out == "mine\n"


def test_all_disables_everything_but_our_own(install: Install, tmp_path: Path) -> None:
    install("acme-bad", "bad", "raise SystemExit", {"plugin bad": "bad", "transport worse": "bad:X"})
    install("tllm-core", "ours", GUARD, {"plugin guard": "ours:GUARD"})
    told = found(tmp_path, TLLM_DISABLE_PLUGINS="all")
    assert {name: item.status for name, item in told.items()} == {"bad": "disabled", "worse": "disabled", "guard": "ok"}
    registry = Registry(path=[str(tmp_path)], environ={"TLLM_DISABLE_PLUGINS": "all"})
    assert registry.names("transport") == []
    with pytest.raises(PluginError, match=r"'worse' of acme-bad .* is disabled by \$TLLM_DISABLE_PLUGINS"):
        registry.transport("worse")
    assert "bad" not in sys.modules


# ------------------------------------------------------------------------------------------------ the command itself

LOUD = """
import os, sys, subprocess
print("from Python")
os.write(1, b"from native code\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
raise RuntimeError("\\x1b[2J and\\nmore")
"""


def tllm_plugins(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = "import sys; from tllm_core.entry import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "plugins", *arguments]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_the_command_lists_them_all_and_succeeds(install: Install, tmp_path: Path) -> None:
    install("acme-loud", "loud", LOUD, {"plugin loud": "loud"})
    install("acme-one", "one", "raise SystemExit('bye')", {"transport zmq": "one:X", "engine one": "one:X"})
    install("acme-guard", "guard", GUARD, {"plugin guard": "guard:GUARD"})
    done = tllm_plugins(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    told = {(item["kind"], item["name"], item["distribution"]): item for item in json.loads(done.stdout)}
    assert told["plugin", "guard", "acme-guard"]["status"] == "ok"
    assert told["launcher", "inline", "tllm-core"]["status"] == "ok"
    assert told["engine", "one", "acme-one"]["detail"] == "SystemExit: bye"
    assert "it prints when it is imported: 'from Python'" in told["plugin", "loud", "acme-loud"]["detail"]
    assert "both have that name" in told["transport", "zmq", "acme-one"]["detail"]
    assert "from native code\nfrom a child\n" in done.stderr


def test_the_table_keeps_to_one_line_for_each_and_passes_no_orders_to_the_terminal(
    install: Install, tmp_path: Path
) -> None:
    install("acme-loud", "loud", LOUD, {"plugin loud": "loud"})
    done = tllm_plugins(tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "acme-loud" in line]
    assert "RuntimeError:  [2J and more" in line
    assert all(
        line.split()[1] in {"KIND", "transport", "engine", "launcher", "plugin"} for line in done.stdout.splitlines()
    )
