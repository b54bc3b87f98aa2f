"""What is built is what is there, and it works where nothing but it is installed."""

import json
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, run

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
SHIPPED = (".py", ".typed", ".json", ".lua")


def test_the_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if (path.is_file() and path.suffix in SHIPPED) or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_no_other_kind_of_file_lies_in_a_package_and_would_be_left_out() -> None:
    left_out = [
        path
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in SHIPPED and path.name != "py.typed" and "__pycache__" not in path.parts
    ]
    assert left_out == []


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and its base dependencies alone."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", symlinks=True)
    binaries = folder / "venv" / "bin"
    run(*pip_of(binaries), "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return binaries


def pip_of(binaries: Path) -> tuple[str | Path, ...]:
    """The pip of this environment, for that one."""
    return (sys.executable, "-m", "pip", "--python", binaries / "python")


def test_the_installed_wheel_lists_its_plugins_and_none_is_broken(installed: Path, tmp_path: Path) -> None:
    found = json.loads(run(installed / "tllm", "plugins", "--json", cwd=tmp_path))
    states = {(item["kind"], item["name"]): item["status"] for item in found}
    assert states["transport", "zmq"] == states["engine", "echo"] == states["launcher", "spawn"] == "ok"
    assert set(states.values()) <= {"ok", "missing extra"}


def test_the_installed_wheel_makes_a_round_trip_between_processes(installed: Path, tmp_path: Path) -> None:
    printed = run(installed / "tllm", "check", "--engine", "echo", "--transport", "zmq", cwd=tmp_path)
    assert "round trip  ok" in printed


def test_the_versions_that_were_tested_satisfy_what_is_required(installed: Path, tmp_path: Path) -> None:
    run(*pip_of(installed), "check", cwd=tmp_path)
