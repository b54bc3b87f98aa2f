"""Keeps the module list in ARCHITECTURE.md: one line per module, the first sentence of its docstring.

Without arguments it writes the list anew; with `--check` it only says whether it is up to date.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- modules: tools/module_list.py -->\n", "<!-- end of modules -->\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}{''.join(listed())}{END}{after}"
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(new, encoding="utf-8")
    elif new != text:
        sys.exit("the module list in ARCHITECTURE.md is not up to date: run python tools/module_list.py")


def listed() -> Iterator[str]:
    """The lines of the list."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    for folder in folders.values():
        paths = sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
        for parent in dict.fromkeys(path.parent for path in paths):
            yield f"\n**{parent.relative_to(ROOT).as_posix()}/**: {sentence(parent / '__init__.py')}\n\n"
            inside = [path for path in paths if path.parent == parent and path.name != "__init__.py"]
            yield from (f"- `{path.name}`: {sentence(path)}\n" for path in inside)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    main()
