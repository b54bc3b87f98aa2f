"""Checks of single values. Those of sampling parameters, `check_...`, raise RequestError, which names the field."""

import threading
from collections import Counter
from itertools import chain
from numbers import Real
from typing import Any

from tllm_core.contracts.tokens import MAX_TOKEN_ID
from tllm_core.errors import RequestError

OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of"})
"""Integers that may be None."""
MOST_BIAS = 100.0
MAX_STRINGS = 65_536
"""Characters of all strings of a field together: an automaton over stop strings takes about 250 bytes for each."""
MAX_WAIT_S = threading.TIMEOUT_MAX
"""Some centuries: the most that a lock can wait for."""
MAX_SHOWN = 200
"""Characters of a wrong value in a message."""


def shown(value: object) -> str:
    """`value` for a message: short, and also where it can't be shown or is an integer of thousands of digits."""
    try:
        text = repr(value)
    except Exception:  # whatever a caller's own class does, or a number that Python won't write out
        return f"this {type(value).__name__}"
    return clipped(text)


def clipped(text: str, limit: int = MAX_SHOWN) -> str:
    """Its first `limit` characters, with a sign that there are more."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_unicode(text: str) -> bool:
    """Whether it can be encoded: half of a surrogate pair can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seconds(timeout: object, error: type[Exception] = ValueError) -> float | None:
    """How long a caller means to wait: None = without end, which is also what `inf` and what no clock can count to are.

    Raises `error` for what is no number of seconds, or below 0.
    """
    if timeout is None:
        return None
    number: Any = None if isinstance(timeout, bool) or not isinstance(timeout, Real) else timeout
    if number is not None and number >= 0:
        return float(number) if number < MAX_WAIT_S else None
    raise error(f"timeout must be a number of seconds, 0 or more, or None, not {shown(timeout)}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in OPTIONAL:
        return
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer, not {shown(value)}", field=name)
    if not low <= value <= high:
        every = "; those of all tokens can't be had" if value == -1 and name.endswith("logprobs") else ""
        raise RequestError(f"{name} must be in [{low}, {high}], not {shown(value)}{every}", field=name)


def check_ids(name: str, values: object) -> None:
    """There may be as many as the vocabulary has: no Python code for each."""
    if not isinstance(values, tuple):
        raise RequestError(f"{name} must be a sequence of token ids, not {shown(values)}", field=name)
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise RequestError(f"{name} must have integers, not {shown(wrong)}", field=name)
    for value in (min(values), max(values)) if values else ():
        if not 0 <= value <= MAX_TOKEN_ID:
            raise RequestError(f"{name} must be in [0, {MAX_TOKEN_ID}], not {shown(value)}", field=name)


def check_runs(name: str, runs: tuple[object, ...]) -> None:
    """Runs of token ids, none of them empty. As `check_ids`, without Python code for each id."""
    for run in runs:
        if not isinstance(run, tuple):
            check_ids(name, run)
        if not run:
            raise RequestError(f"{name} has an empty one", field=name)
    check_ids(name, tuple(chain.from_iterable(runs)))  # type: ignore[arg-type] # they are tuples


def check_bias(pairs: object) -> None:
    """(token id, bias) pairs, each token once. As `check_ids`, without Python code for each."""
    if not isinstance(pairs, tuple) or set(map(type, pairs)) != {tuple} or set(map(len, pairs)) != {2}:
        raise RequestError(f"logit_bias must be pairs of token id and bias, not {shown(pairs)}", field="logit_bias")
    ids, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_ids("logit_bias", tuple(ids))
    if len(set(ids)) < len(ids):
        twice = next(token_id for token_id, count in Counter(ids).items() if count > 1)
        raise RequestError(f"logit_bias has the token id {twice} twice", field="logit_bias")
    known = set(map(type, values)) <= {int, float}
    if known and all(map(MOST_BIAS.__ge__, values)) and all(map((-MOST_BIAS).__le__, values)):  # NaN is neither
        return
    wrong = next(v for v in values if type(v) not in (int, float) or not -MOST_BIAS <= v <= MOST_BIAS)
    raise RequestError(
        f"logit_bias must have numbers in [{-MOST_BIAS:g}, {MOST_BIAS:g}], not {shown(wrong)}", field="logit_bias"
    )


def check_strings(name: str, values: object) -> None:
    """Not empty, and MAX_STRINGS characters together at most, so that they are not more than that either."""
    if not isinstance(values, tuple | list) or any(not isinstance(value, str) or not value for value in values):
        raise RequestError(f"{name} must be a sequence of non-empty strings, not {shown(values)}", field=name)
    if (characters := sum(map(len, values))) > MAX_STRINGS:
        raise RequestError(f"{name} has {characters} characters in all, and {MAX_STRINGS} are the most", field=name)
    if not all(map(is_unicode, values)):
        raise RequestError(f"{name} holds half of a surrogate pair, which is no Unicode text", field=name)


def check_float(name: str, value: object, low: float, high: float, open_low: bool) -> None:
    if type(value) not in (int, float):
        raise RequestError(f"{name} must be a number, not {shown(value)}", field=name)
    # Compared as it is: an integer may be too large for a float, and NaN is in no range.
    if not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        raise RequestError(
            f"{name} must be in {'(' if open_low else '['}{low}, {high}], not {shown(value)}", field=name
        )
