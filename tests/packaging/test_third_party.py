"""The packages of examples/ are what a third party would release: their wheels work beside ours, and nothing else does it."""

from __future__ import annotations

import json
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.building import ROOT, copy_of, run

PACKAGES = {path.parent.name: path.parent for path in sorted((ROOT / "examples").glob("*/pyproject.toml"))}
NEVER_LINKED = ("..", "__pycache__", "bin")
SUITES_S = 590.0
"""Of one package's tests; their cases have limits of their own."""


def project(name: str) -> dict[str, Any]:
    described: dict[str, Any] = tomllib.loads((PACKAGES[name] / "pyproject.toml").read_text(encoding="utf-8"))
    return described["project"]


class Installed:
    """An environment with all wheels. `folders`: a copy of each package's own folder, for its tests."""

    def __init__(self, binaries: Path, folders: Mapping[str, Path]) -> None:
        self.binaries, self.folders = binaries, folders

    def python(self, *words: str | Path, cwd: Path, **variables: str) -> str:
        return run(self.binaries / "python", *words, cwd=cwd, timeout=SUITES_S, **variables)

    def tllm(self, *words: str, cwd: Path) -> str:
        return run(self.binaries / "tllm", *words, cwd=cwd)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What is built here is installed from wheels; the libraries that it declares are those of this environment, by links,
    because a torch of its own would be gigabytes. What is not declared is not there, and pip can't fetch it either.
    """
    folder = tmp_path_factory.mktemp("third_party")
    folders = {name: copy_of(tree, folder / "sources" / name) for name, tree in PACKAGES.items()}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheels", *folders.values(), cwd=folder)
    wheels = [wheel, *(folder / "wheels").glob("*.whl")]
    wanted = [Requirement(f"{project(name)['name']}[test]") for name in PACKAGES]

    venv.create(folder / "venv", symlinks=True)
    binaries = folder / "venv" / "bin"
    site = Path(run(binaries / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    libraries = folder / "libraries"
    libraries.mkdir()
    for library in needed(wanted, {canonicalize_name(one.name): one for one in map(described_by, wheels)}):
        link(library, libraries)
    (site / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")

    install = (
        *pip,
        "--python",
        binaries / "python",
        "install",
        "--quiet",
        "--no-index",
        "-c",
        ROOT / "constraints.txt",
    )
    sources = [word for path in {one.parent for one in wheels} for word in ("--find-links", path)]
    run(*install, *sources, *map(str, wanted), cwd=folder)
    return Installed(binaries, folders)


def described_by(wheel: Path) -> metadata.Distribution:
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
    return metadata.PathDistribution(zipfile.Path(wheel, name.removesuffix("METADATA")))  # type: ignore[arg-type]


def needed(
    wanted: Sequence[Requirement], built: Mapping[str, metadata.Distribution]
) -> Iterator[metadata.Distribution]:
    """All that these come to need, extras and all, less what is built here."""
    seen: set[tuple[str, str]] = set()
    todo = list(wanted)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        found = built.get(name) or metadata.distribution(name)
        if name not in built and not any(name == one for one, _ in seen):
            yield found
        for extra in {"", *requirement.extras} - {extra for one, extra in seen if one == name}:
            seen.add((name, extra))
            more = map(Requirement, found.requires or ())
            todo += [one for one in more if one.marker is None or one.marker.evaluate({"extra": extra})]


def link(library: metadata.Distribution, folder: Path) -> None:
    assert library.files, f"{library.name} does not say which files it has"
    for top in {file.parts[0] for file in library.files}:
        target = folder / top
        if top not in NEVER_LINKED and not top.endswith(".pth") and not target.is_symlink():
            target.symlink_to(Path(str(library.locate_file(top))))


def test_there_are_packages() -> None:
    assert "tllm-transport-unix" in PACKAGES


def test_what_is_tested_is_what_was_installed(installed: Installed, tmp_path: Path) -> None:
    found = installed.python("-c", "import tllm_core; print(tllm_core.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.binaries.parent)
    run(sys.executable, "-m", "pip", "--python", installed.binaries / "python", "check", cwd=tmp_path)


def test_plugins_are_listed_with_their_distribution(installed: Installed, tmp_path: Path) -> None:
    listed = json.loads(installed.tllm("plugins", "--json", cwd=tmp_path))
    states = {(item["kind"], item["name"]): (item["distribution"], item["status"]) for item in listed}
    for name in PACKAGES:
        for group, entries in project(name)["entry-points"].items():
            for entry in entries:
                kind = group.removeprefix("tllm_core.").removesuffix("s")
                assert states[kind, entry] == (project(name)["name"], "ok")


@pytest.mark.timeout(SUITES_S + 10)
@pytest.mark.parametrize("name", PACKAGES)
def test_its_own_tests_pass(name: str, installed: Installed) -> None:
    installed.python("-m", "pytest", "-q", cwd=installed.folders[name], TLLM_CONFORMANCE_STRICT="1")


def test_the_command_line_runs_the_suite_on_it(installed: Installed, tmp_path: Path) -> None:
    words = ("conformance", "transport", "unix", "--only", "frames_cross", "--report", "report.json")
    printed = installed.tllm(*words, cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["distribution"] == "tllm-transport-unix"
    assert {outcome["result"] for outcome in report["outcomes"]} == {"pass"}
    assert "frames_cross_between_processes" in printed
