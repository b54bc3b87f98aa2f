"""Plain data, as it may cross a process boundary. What is refused here is refused by every transport alike."""

from collections.abc import Sequence

from tllm_core.contracts.values import is_unicode, shown

MAX_DEPTH = 100
"""How deep lists and dicts may lie in each other."""
MIN_INT, MAX_INT = -(2**63), 2**64 - 1

_CAREFREE = frozenset({type(None), bool, float, bytes, bytearray})
"""Types of which every value can be sent."""


def objection(value: object, depth: int = 0) -> str | None:
    """Why `value` can't be sent, as what follows its name; None where it is plain data."""
    kind = type(value)
    if kind in _CAREFREE:
        return None
    if kind is int:
        return None if MIN_INT <= value <= MAX_INT else "has an integer outside [-2^63, 2^64)"  # type: ignore[operator]
    if kind is str:
        return None if is_unicode(value) else "has text with half of a surrogate pair, which is no Unicode"  # type: ignore[arg-type]
    if depth == MAX_DEPTH:
        return f"has lists or dicts more than {MAX_DEPTH} deep, or one that holds itself"
    if isinstance(value, dict):
        if wrong := [key for key in value if type(key) is not str]:
            return f"has a dict with the key {shown(wrong[0])}, which is no string"
        return _first(list(value), depth) or _first(list(value.values()), depth)
    if isinstance(value, list | tuple):
        return _first(value, depth)
    return f"has {shown(value)}, which is no plain data (None, bool, int, float, str, bytes, lists and dicts of them)"


def _first(values: Sequence[object], depth: int) -> str | None:
    if _CAREFREE.issuperset(map(type, values)):
        return None
    return next((found for each in values if (found := objection(each, depth + 1)) is not None), None)
