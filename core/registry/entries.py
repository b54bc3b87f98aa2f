"""Which plugins are installed: reads the metadata of distributions and imports none of them."""

import contextlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from msgspec import Struct

Kind: TypeAlias = Literal["transport", "engine", "launcher", "plugin"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS: dict[str, Kind] = {f"tllm_core.{kind}s": kind for kind in KINDS}


class Entry(Struct, frozen=True):
    """One entry point.

    value: "module:Object" or "module". extras: the names of the distributions that each extra requires; "" = always.
    """

    kind: Kind
    name: str
    value: str
    distribution: str
    version: str
    extras: dict[str, tuple[str, ...]] = {}

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin} (entry point {self.name} = {self.value})"


def installed_entries(path: Sequence[str] | None = None) -> Iterator[Entry]:
    """All entry points of our groups in the distributions on `path` (None = `sys.path`).

    Of two installations of one distribution the first on the path counts, as it does for imports. Metadata that can't be
    read names no plugin.
    """
    seen: set[str] = set()
    for distribution in _distributions(path):
        entries: list[Entry] = []
        with contextlib.suppress(Exception):  # a half-removed neighbour must not hide the others
            entries = _entries_of(distribution)
        if entries and canonical(entries[0].distribution) not in seen:
            seen.add(canonical(entries[0].distribution))
            yield from entries


def owner_of(reference: str) -> Entry | None:
    """An entry point of the distribution that "module:Object" most likely belongs to: one of the same top-level package."""
    return next((entry for entry in installed_entries() if top_level(entry.value) == top_level(reference)), None)


def canonical(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def top_level(reference: str) -> str:
    """The top-level package of "package.module:Object"."""
    return reference.partition(":")[0].partition(".")[0]


def _distributions(path: Sequence[str] | None) -> Iterable[importlib.metadata.Distribution]:
    return importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=list(path))


def _entries_of(distribution: importlib.metadata.Distribution) -> list[Entry]:
    points = [point for point in distribution.entry_points if point.group in GROUPS]
    if not points:
        return []
    name, version, extras = distribution.metadata["Name"], distribution.version, _requirements(distribution.requires)
    if not name or not version:
        raise ValueError("METADATA is missing or empty")
    return [
        Entry(GROUPS[point.group], point.name, point.value.partition("[")[0].strip(), name, version, extras)
        for point in points
    ]


def _requirements(requires: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    extras: dict[str, list[str]] = {}
    for line in requires or ():
        name = re.match(r"\s*([\w.-]+)", line)
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)['"]""", line)
        if name:
            extras.setdefault(extra[1] if extra else "", []).append(canonical(name[1]))
    return {extra: tuple(names) for extra, names in extras.items()}
