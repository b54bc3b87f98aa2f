"""What docs/write-*.md quote is in the package that they walk through, word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs").glob("write-*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PACKAGE = re.compile(r"examples/(tllm-[a-z-]+)")
CODE = ("python", "toml")
"""Blocks in these languages are quotations."""


class Quotation(Struct, frozen=True):
    """line: in the tutorial, of the block's first line."""

    line: int
    text: str


def quotations(page: str) -> list[Quotation]:
    return [
        Quotation(page.count("\n", 0, match.start(2)) + 1, match[2])
        for match in FENCE.finditer(page)
        if match[1] in CODE
    ]


def package_of(page: str) -> Path:
    """The one that the page names."""
    names: set[str] = set(PACKAGE.findall(page))
    assert len(names) == 1, f"a tutorial walks through one package of examples/, and this one names {sorted(names)}"
    return ROOT / "examples" / names.pop()


def sources(package: Path) -> dict[Path, str]:
    paths = [package / "pyproject.toml", *(package / "src").rglob("*.py"), *(package / "tests").rglob("*.py")]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def misquoted(page: str, texts: list[str]) -> list[Quotation]:
    """Those that are in none of the texts as whole, consecutive lines."""
    whole = ["\n" + text for text in texts]
    return [quotation for quotation in quotations(page) if not any("\n" + quotation.text in text for text in whole)]


@pytest.fixture(params=TUTORIALS, ids=lambda path: path.stem)
def tutorial(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_there_is_a_tutorial_to_check() -> None:
    assert ROOT / "docs" / "write-an-engine.md" in TUTORIALS


def test_every_block_of_code_is_quoted_word_for_word(tutorial: Path) -> None:
    page = tutorial.read_text(encoding="utf-8")
    wrong = misquoted(page, list(sources(package_of(page)).values()))
    assert not wrong, "\n".join(f"{tutorial.name}:{each.line}: not in the package:\n{each.text}" for each in wrong)


def test_every_module_of_the_package_is_quoted(tutorial: Path) -> None:
    """What is left out of a tutorial is what nobody will understand."""
    page = tutorial.read_text(encoding="utf-8")
    package = package_of(page)
    blocks = [quotation.text for quotation in quotations(page)]
    silent = [
        path.relative_to(package).as_posix()
        for path, text in sources(package).items()
        if path.is_relative_to(package / "src") and path.name != "__init__.py" and not any(b in text for b in blocks)
    ]
    assert silent == []


def test_every_link_leads_somewhere(tutorial: Path) -> None:
    links = LINK.findall(tutorial.read_text(encoding="utf-8"))
    assert [link for link in links if not (tutorial.parent / link).exists()] == []


def test_a_changed_a_shortened_and_a_made_up_line_are_misquotations() -> None:
    source = "def f() -> int:\n    return 1\n\n\ndef g() -> int:\n    return 2\n"
    for block, wrong in (
        ("def f() -> int:\n    return 1\n", False),
        ("    return 1\n\n\ndef g() -> int:\n", False),
        ("def f() -> int:\n    return 2\n", True),
        ("f() -> int:\n", True),
        ("def f() -> int:\n    return\n", True),
    ):
        page = f"Text.\n\n```python\n{block}```\n\n```console\n$ any thing\n```\n"
        assert bool(misquoted(page, [source])) is wrong, block
