"""Distributions for tests, laid out as pip does."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Lays a distribution out in a folder that is on sys.path for the test; `entries` maps "kind name" to a value."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def lay(
        name: str, module: str, code: str, entries: dict[str, str], metadata: str = "", version: str = "1.0"
    ) -> Path:
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        groups: dict[str, list[str]] = {}
        for key, value in entries.items():
            kind, _, entry = key.partition(" ")
            groups.setdefault(kind, []).append(f"{entry} = {value}")
        text = "".join(f"[tllm_core.{kind}s]\n" + "\n".join(lines) + "\n" for kind, lines in groups.items())
        (info / "entry_points.txt").write_text(text)
        return info

    yield lay
    for name in set(sys.modules) - before:
        del sys.modules[name]
