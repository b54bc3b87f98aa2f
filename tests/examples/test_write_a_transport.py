"""docs/write-a-transport.md quotes what is there, and its package's README.md says what is so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "tllm-transport-unix"
PAGE = (ROOT / "docs" / "write-a-transport.md").read_text(encoding="utf-8")
SOURCES = [path.read_text(encoding="utf-8") for path in (*PACKAGE.glob("*/**/*.py"), PACKAGE / "pyproject.toml")]
QUOTES = re.findall(r"^```(?:python|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \|", re.MULTILINE)


def test_there_are_quotes() -> None:
    assert len(QUOTES) > 10


@pytest.mark.parametrize("quote", QUOTES, ids=[quote.partition("\n")[0].strip() for quote in QUOTES])
def test_what_is_quoted_is_in_the_source_as_it_is(quote: str) -> None:
    assert any(f"\n{quote}" in source for source in SOURCES)


def test_every_file_of_the_package_is_named() -> None:
    folder = PAGE.partition("## The folder")[2].partition("##")[0]
    files = [path.name for path in PACKAGE.glob("*/**/*.py")]
    assert [name for name in files if name not in folder] == []


def test_every_setting_is_in_the_table_with_its_default() -> None:
    path = PACKAGE / "src" / "tllm_transport_unix" / "settings.py"
    spec = importlib.util.spec_from_file_location("unix_settings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = dict(ROW.findall((PACKAGE / "README.md").read_text(encoding="utf-8")))
    fields = msgspec.structs.fields(module.UnixSettings)
    assert rows == {field.name: "" if field.default is None else str(field.default) for field in fields}
