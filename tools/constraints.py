"""Writes constraints.txt: the versions, in this environment, of everything that tllm-core and its extras need.

Run it in an environment in which the whole check passes; that is what "tested versions" means. Local version labels
(`+cpu`) are left out, so that any build of the same version satisfies the pin. The flashinfer extra, which only a machine
with a GPU can have, is left out.
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "tllm-core"
EXTRAS = frozenset({"nats", "redis", "text", "engine", "guided", "uvloop", "test"})


def main() -> None:
    pins: dict[str, str] = {}
    collect(PROJECT, EXTRAS, pins, set())
    del pins[PROJECT]
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    text = "# Tested versions; written by tools/constraints.py.\n" + "".join(lines)
    (ROOT / "constraints.txt").write_text(text, encoding="utf-8")


def collect(name: str, extras: frozenset[str], pins: dict[str, str], seen: set[str]) -> None:
    """Adds the distribution `name`, and all that it requires with `extras`, to `pins`."""
    seen.add(f"{name}{sorted(extras)}")
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed here; install '.[test]' first") from None
    pins[str(canonicalize_name(name))] = re.sub(r"\+.*", "", found.version)
    for needed in map(Requirement, found.requires or ()):
        applies = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if applies and f"{needed.name}{sorted(needed.extras)}" not in seen:
            collect(needed.name, frozenset(needed.extras), pins, seen)


if __name__ == "__main__":
    main()
