"""Builds `.typing/`, a tree of links in which type checkers find the mapped folders under their import names.

The folders are named `core`, `transports`, ... while the packages are `tllm_core`, `tllm_core.transports`, ...; an editable
install maps them with an import hook that no type checker runs. The mapping is read from pyproject.toml, never repeated.
"""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".typing"


def main() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(TREE, ignore_errors=True)
    for package, folder in sorted(folders.items(), key=lambda item: item[0].count(".")):
        target = TREE.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(ROOT / folder)
            continue
        target.mkdir(parents=True)
        for entry in (ROOT / folder).iterdir():
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)


if __name__ == "__main__":
    main()
