"""How to sample, and what a good value of each parameter is."""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import force_setattr

from tllm_core.contracts.guided import GuidedDecoding as GuidedDecoding
from tllm_core.contracts.tokens import MAX_TOKEN_ID
from tllm_core.contracts.values import check_bias, check_float, check_ids, check_int, check_runs, check_strings, shown
from tllm_core.errors import RequestError


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """How to sample. The default is greedy and runs until the model stops or what fits is full.

    n: sequences per prompt. max_tokens: new tokens per sequence at most; None = what fits. min_tokens: no stop before.
    temperature: 0 = greedy. top_k: 0 = off. top_p, min_p: in [0, 1]. repetition_penalty: > 0, 1 = off.
    presence_penalty, frequency_penalty: in [-2, 2]. seed: None = drawn anew. stop: strings (LLM only), of 65,536 characters
    together at most.
    include_stop_str_in_output: what ends a sequence, a stop string, one of stop_token_ids or the model's own end, is part of
    its text, tokens and logprobs; else it is in none of them.
    logprobs, prompt_logprobs: None = off, 0 = the sampled token's alone, k = the top k besides.
    logit_bias: (token id, what is added to its logit, in [-100, 100]) pairs, or a mapping of them. allowed_token_ids: no
    others may come; None = all. bad_words: texts that may not come (LLM only), of 65,536 characters together at most.
    bad_token_sequences: runs of token ids that may not come. best_of: so many sequences are generated, and the n with the
    largest cumulative logprob are returned, at the end; None = n. guided: what the text must match; a mapping of its fields
    will do.
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    best_of: int | None = None
    guided: GuidedDecoding | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(value := getattr(self, name), str):
                force_setattr(self, name, (value,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if isinstance(value := getattr(self, name), list):  # a caller's list could change after it was checked
                force_setattr(self, name, tuple(value))
        if not _is_empty(self.logit_bias):
            force_setattr(self, "logit_bias", _pairs(self.logit_bias))
        if not _is_empty(self.bad_token_sequences):
            force_setattr(self, "bad_token_sequences", _tuples(self.bad_token_sequences))
        if isinstance(guided := getattr(self, "guided"), Mapping):  # noqa: B009 - the declared type is what it becomes here
            force_setattr(self, "guided", _guided(guided))

    @property
    def sequences(self) -> int:
        """How many are generated."""
        return self.n if self.best_of is None else self.best_of

    def check(self, *, streaming: bool = False) -> None:
        """Raises RequestError, which names the field, for any value of a wrong type or outside its range."""
        for name, least, most in _INT_RANGES:
            check_int(name, getattr(self, name), least, most)
        for name, low, high, open_low in _FLOAT_RANGES:
            check_float(name, getattr(self, name), low, high, open_low)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", field=name)
        check_strings("stop", self.stop)
        check_strings("bad_words", self.bad_words)
        check_ids("stop_token_ids", self.stop_token_ids)
        self._check_limits()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", field="min_tokens"
            )
        self._check_best_of(streaming)

    def _check_limits(self) -> None:
        """Of which tokens may come."""
        if not _is_empty(self.logit_bias):
            check_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty, so that nothing could come; None allows all", field="allowed_token_ids"
                )
        if not isinstance(self.bad_token_sequences, tuple):
            raise RequestError(
                f"bad_token_sequences must be sequences of token ids, not {shown(self.bad_token_sequences)}",
                field="bad_token_sequences",
            )
        if self.bad_token_sequences:
            check_runs("bad_token_sequences", self.bad_token_sequences)
        if self.guided is not None:
            if not isinstance(self.guided, GuidedDecoding):
                raise RequestError(f"guided must be a GuidedDecoding, not {shown(self.guided)}", field="guided")
            self.guided.check()

    def _check_best_of(self, streaming: bool) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise RequestError(
                f"best_of {self.best_of} is below n {self.n}: there would be too few to choose from", field="best_of"
            )
        if streaming and self.best_of > self.n:
            raise RequestError(
                f"best_of {self.best_of} can't be streamed: which {self.n} of them are the best is known at the end;"
                " ask with streaming=False",
                field="best_of",
            )

    def largest_ids(self) -> Iterator[tuple[str, int]]:
        """The largest token id of each field that has any, with the field's name. For parameters that were checked."""
        if self.stop_token_ids:
            yield "stop_token_ids", max(self.stop_token_ids)
        if self.logit_bias:
            yield "logit_bias", max(self.logit_bias)[0]
        if self.allowed_token_ids:
            yield "allowed_token_ids", max(self.allowed_token_ids)
        if self.bad_token_sequences:
            yield "bad_token_sequences", max(map(max, self.bad_token_sequences))


_INT_RANGES: tuple[tuple[str, int, int], ...] = (
    ("n", 1, 1024),
    ("max_tokens", 1, MAX_TOKEN_ID),
    ("min_tokens", 0, MAX_TOKEN_ID),
    ("top_k", 0, MAX_TOKEN_ID),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, 1024),
    ("prompt_logprobs", 0, 1024),
    ("best_of", 1, 1024),
)
_FLOAT_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


def _is_empty(values: object) -> bool:
    """Whether it is (); arrays have no truth of their own."""
    return type(values) is tuple and not values


def _pairs(bias: object) -> object:
    """Of a mapping too, whose keys JSON makes strings."""
    if isinstance(bias, Mapping):
        return tuple((_key(token_id), value) for token_id, value in bias.items())
    return _tuples(bias)


def _tuples(values: object) -> object:
    """Without the lists in it; what is no sequence is left to the check."""
    if isinstance(values, list | tuple) and list in {type(values), *map(type, values)}:
        return tuple(tuple(value) if isinstance(value, list) else value for value in values)
    return values


def _key(token_id: object) -> object:
    return int(token_id) if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit() else token_id


def _guided(fields: Mapping[str, object]) -> GuidedDecoding:
    for name in fields:
        if name not in GuidedDecoding.__struct_fields__:
            names = ", ".join(GuidedDecoding.__struct_fields__)
            raise RequestError(f"guided has no field {name!r}; there are: {names}", field="guided")
    return GuidedDecoding(**fields)  # type: ignore[arg-type]
