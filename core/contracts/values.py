"""Checks of single values of sampling parameters. Each raises RequestError, which names the field."""

import math

from tllm_core.contracts.tokens import MAX_TOKEN_ID
from tllm_core.errors import RequestError

OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of"})
"""Integers that may be None."""
MOST_BIAS = 100.0


def check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in OPTIONAL:
        return
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer, not {value!r}", field=name)
    if not low <= value <= high:
        every = "; those of all tokens can't be had" if value == -1 and name.endswith("logprobs") else ""
        raise RequestError(f"{name} must be in [{low}, {high}], not {value}{every}", field=name)


def check_ids(name: str, values: object) -> None:
    """There may be as many as the vocabulary has: no Python code for each."""
    if not isinstance(values, tuple):
        raise RequestError(f"{name} must be a sequence of token ids, not {values!r:.200}", field=name)
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise RequestError(f"{name} must have integers, not {wrong!r}", field=name)
    for value in (min(values), max(values)) if values else ():
        if not 0 <= value <= MAX_TOKEN_ID:
            raise RequestError(f"{name} must be in [0, {MAX_TOKEN_ID}], not {value}", field=name)


def check_bias(pairs: object) -> None:
    """(token id, bias) pairs, each token once. As `check_ids`, without Python code for each."""
    if not isinstance(pairs, tuple) or set(map(type, pairs)) != {tuple} or set(map(len, pairs)) != {2}:
        raise RequestError(f"logit_bias must be pairs of token id and bias, not {pairs!r:.200}", field="logit_bias")
    ids, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_ids("logit_bias", tuple(ids))
    if len(set(ids)) < len(ids):
        twice = next(token_id for token_id in ids if ids.count(token_id) > 1)
        raise RequestError(f"logit_bias has the token id {twice} twice", field="logit_bias")
    known = set(map(type, values)) <= {int, float}
    if known and all(map(MOST_BIAS.__ge__, values)) and all(map((-MOST_BIAS).__le__, values)):  # NaN is neither
        return
    wrong = next(v for v in values if type(v) not in (int, float) or not -MOST_BIAS <= v <= MOST_BIAS)
    raise RequestError(
        f"logit_bias must have numbers in [{-MOST_BIAS:g}, {MOST_BIAS:g}], not {wrong!r:.40}", field="logit_bias"
    )


def check_strings(name: str, values: object) -> None:
    if not isinstance(values, tuple | list) or any(not isinstance(value, str) or not value for value in values):
        raise RequestError(f"{name} must be a sequence of non-empty strings, not {values!r}", field=name)


def check_float(name: str, value: object, low: float, high: float, open_low: bool) -> None:
    if type(value) not in (int, float):
        raise RequestError(f"{name} must be a number, not {value!r}", field=name)
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        raise RequestError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], not {value}", field=name)
