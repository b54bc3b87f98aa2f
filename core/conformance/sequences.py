"""Comparing what came with what should have come."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


def check_same(got: Sequence[object], wanted: Sequence[object]) -> None:
    """Both are the same, element by element; a failure names the first place where they differ.

    pytest's own diff of thousands of frames takes minutes, and a case that makes one is seen to end by its time limit.
    """
    if got == wanted:
        return
    differ = (place for place, (one, other) in enumerate(zip(got, wanted, strict=False)) if one != other)
    place = next(differ, min(len(got), len(wanted)))
    raise AssertionError(
        f"{len(got)} of {len(wanted)}, {_at(got, place)} at place {place} instead of {_at(wanted, place)}"
    )


def _at(sequence: Sequence[object], place: int) -> str:
    return reprlib.repr(sequence[place]) if place < len(sequence) else "nothing"
