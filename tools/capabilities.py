"""Keeps docs/capabilities.md: which transport and which engine can do what, from what their classes declare.

Without arguments it writes the page anew; with `--check` it only says whether it is up to date.
"""

import enum
import inspect
import sys
import tomllib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from tllm_core.contracts.interfaces import Capability, EngineCapability
from tllm_core.registry import load_object

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "capabilities.md"
HEAD = """\
# Capabilities

<!-- written by tools/capabilities.py from the classes; do not edit -->

What a class declares is checked by the suite that `tllm conformance` runs: what is declared and does not hold fails, and
what holds and is not declared is told.
"""


def main() -> None:
    new = "\n".join([HEAD, *page()])
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(new, encoding="utf-8")
    elif not PAGE.exists() or new != PAGE.read_text(encoding="utf-8"):
        sys.exit("docs/capabilities.md is not up to date: run python tools/capabilities.py")


def page() -> Iterator[str]:
    """The page's parts, each ending in a line end."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    transports = {name: load_object(value) for name, value in groups["tllm_core.transports"].items()}
    engines = {name: load_object(load_object(value).load) for name, value in groups["tllm_core.engines"].items()}
    launchers = {name: load_object(value) for name, value in groups["tllm_core.launchers"].items()}
    yield "## Transports\n"
    yield table(Capability, {name: found.capabilities for name, found in transports.items()})
    yield meanings(Capability)
    yield "## Engines\n"
    yield table(EngineCapability, {name: found.capabilities for name, found in engines.items()})
    yield meanings(EngineCapability)
    yield "## Launchers\n\nWhat they need of a transport; a pair that can't work is refused before anything starts.\n"
    yield table(Capability, {name: found.needs for name, found in launchers.items()}, only_used=True)


def table(kind: type[enum.Flag], declared: dict[str, enum.Flag], *, only_used: bool = False) -> str:
    """A column per capability, a row per name."""
    flags = [flag for flag in kind if not only_used or any(flag in one for one in declared.values())]
    rows = [["", *(f"`{flag.name}`" for flag in flags)], ["---"] * (len(flags) + 1)]
    rows += [[f"`{name}`", *("yes" if flag in one else "" for flag in flags)] for name, one in sorted(declared.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def meanings(kind: type[enum.Flag]) -> str:
    """What the docstrings below the members say."""
    lines = inspect.getsource(kind).splitlines()
    return "".join(_meanings(pairwise(lines)))


def _meanings(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for line, below in pairs:
        name, equals, _ = line.strip().partition(" = ")
        if equals and below.strip().startswith('"""'):
            yield f"- `{name}`: {below.strip().strip(chr(34))}\n"


if __name__ == "__main__":
    main()
