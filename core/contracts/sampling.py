"""How to sample, and what a good value of each parameter is."""

import math

from msgspec import Struct
from msgspec.structs import force_setattr

from tllm_core.contracts.tokens import MAX_TOKEN_ID
from tllm_core.errors import RequestError


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """How to sample. The default is greedy and runs until the model stops or what fits is full.

    n: sequences per prompt. max_tokens: new tokens per sequence at most; None = what fits. min_tokens: no stop before.
    temperature: 0 = greedy. top_k: 0 = off. top_p, min_p: in [0, 1]. repetition_penalty: > 0, 1 = off.
    presence_penalty, frequency_penalty: in [-2, 2]. seed: None = drawn anew. stop: strings (LLM only).
    logprobs, prompt_logprobs: None = off, 0 = the sampled token's alone, k = the top k besides.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(stop := getattr(self, "stop"), str):  # noqa: B009 - the declared type is what it becomes here
            force_setattr(self, "stop", (stop,))
        for name in ("stop", "stop_token_ids"):  # a caller's list could change after it was checked
            if isinstance(value := getattr(self, name), list):
                force_setattr(self, name, tuple(value))

    def check(self) -> None:
        """Raises RequestError, which names the field, for any value of a wrong type or outside its range."""
        for name, least, most in _INT_RANGES:
            _check_int(name, getattr(self, name), least, most)
        for name, low, high, open_low in _FLOAT_RANGES:
            _check_float(name, getattr(self, name), low, high, open_low)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", field=name)
        _check_strings("stop", self.stop)
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestError(
                f"stop_token_ids must be a sequence, not {self.stop_token_ids!r}", field="stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, MAX_TOKEN_ID)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", field="min_tokens"
            )


_INT_RANGES: tuple[tuple[str, int, int], ...] = (
    ("n", 1, 1024),
    ("max_tokens", 1, MAX_TOKEN_ID),
    ("min_tokens", 0, MAX_TOKEN_ID),
    ("top_k", 0, MAX_TOKEN_ID),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, 1024),
    ("prompt_logprobs", 0, 1024),
)
_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs"})
_FLOAT_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer, not {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], not {value}", field=name)


def _check_strings(name: str, values: object) -> None:
    if not isinstance(values, tuple | list) or any(not isinstance(value, str) or not value for value in values):
        raise RequestError(f"{name} must be a sequence of non-empty strings, not {values!r}", field=name)


def _check_float(name: str, value: object, low: float, high: float, open_low: bool) -> None:
    if type(value) not in (int, float):
        raise RequestError(f"{name} must be a number, not {value!r}", field=name)
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        raise RequestError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], not {value}", field=name)
