"""The protocol: what requests, outputs and every frame's content are.

All are msgspec Structs; nothing here is ever pickled. Those that cross a process boundary are encoded as arrays, so a
field is only ever appended, with a default; a change of meaning raises `WIRE_VERSION` (`wire/header.py`).
"""

import enum
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Self, TypeAlias, overload

from msgspec import Struct, field
from msgspec.structs import force_setattr

from tllm_core.errors import RequestError

Plain: TypeAlias = Any
"""None, bool, int, float, str, bytes, and lists and dicts (with string keys) of them."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "error"]
FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort", "timeout", "error")
"""A finish code on the wire is the index in this tuple."""
FINISH_CODES: dict[FinishReason | None, int] = {reason: code for code, reason in enumerate(FINISH_REASONS)}

MAX_TOKEN_ID = 2**31 - 1


class TokenIds:
    """An immutable sequence of int32 token ids in one little-endian buffer; crosses a process boundary without a copy.

    `view` is a memoryview of format "i", shape [length]; `torch.frombuffer(ids.view, dtype=torch.int32)` does not copy.
    """

    __slots__ = ("view",)

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        raw = memoryview(buffer).cast("B")
        if sys.byteorder != "little":
            swapped = array("i", raw.tobytes())
            swapped.byteswap()
            raw = memoryview(swapped).cast("B")
        self.view = raw.cast("i")

    @classmethod
    def of(cls, values: "TokenIds | Iterable[int]", field: str = "prompt_token_ids") -> Self:
        """Snapshots `values`: any iterable of ints, or a 1-D int32 buffer (numpy, array, torch through numpy).

        Raises RequestError for anything that is no flat sequence of token ids in [0, 2^31).
        """
        if isinstance(values, cls):
            return values
        if isinstance(values, str | bytes):
            raise RequestError(f"{field} must be token ids, not {type(values).__name__}; LLM takes text", field=field)
        try:
            ids = array("i", _int32_bytes(values)) if _is_int32_buffer(values) else array("i", values)
        except OverflowError:
            raise RequestError(f"{field} has a token id outside [0, {MAX_TOKEN_ID}]", field=field) from None
        except TypeError:
            raise RequestError(f"{field} must be a flat sequence of integer token ids", field=field) from None
        if ids and min(ids) < 0:
            raise RequestError(f"{field} has the negative token id {min(ids)}", field=field)
        if sys.byteorder != "little":
            ids.byteswap()
        return cls(ids.tobytes())

    def tolist(self) -> list[int]:
        return self.view.tolist()

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.view[index] if isinstance(index, int) else self.view[index].tolist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.view == other.view
        return self.tolist() == other

    def __hash__(self) -> int:
        return hash(self.view.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.view[:8])) + (", ..." if len(self) > 8 else "")
        return f"TokenIds([{shown}], length={len(self)})"


def _is_int32_buffer(values: object) -> bool:
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        return False
    return view.format == "i" and view.ndim == 1


def _int32_bytes(values: object) -> bytes:
    return memoryview(values).tobytes()  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- requests


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


class GenerationRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One prompt and how to continue it, as the caller means it.

    timeout_s: the request's whole budget in seconds, in queue, prefill and decode; it ends with finish reason "timeout".
    priority: lower runs first; a hint. cache_salt: prefixes are shared only between equal salts.
    trace_context: W3C headers, carried along. extra: plain data that the engine's declared type validates.
    """

    prompt_token_ids: TokenIds
    sampling: SamplingParams = SamplingParams()
    streaming: bool = False
    timeout_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    trace_context: dict[str, str] | None = None
    extra: dict[str, Plain] | None = None


class EngineRequest(Struct, frozen=True, kw_only=True, gc=False):
    """What an engine gets: the request under an id that is its own and never used again."""

    request_id: int
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    trace_context: dict[str, str] | None = None
    extra: dict[str, Plain] | None = None


# ---------------------------------------------------------------------------------------------------- outputs


class Logprob(Struct, frozen=True, array_like=True, gc=False):
    """The natural log of one token's probability under the raw logits, and its rank among all (1 = the largest)."""

    token_id: int
    logprob: float
    rank: int


TokenLogprobs: TypeAlias = Sequence[Logprob]
"""Of one position: the sampled (or prompt) token's first, then the top k, best first."""


class RequestMetrics(Struct, frozen=True, array_like=True, gc=False):
    """Seconds that the engine measured for one finished request; counts are tokens."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class ErrorReport(Struct, frozen=True, array_like=True):
    """A RequestError on the wire."""

    message: str
    field: str | None = None


class Output(Struct, kw_only=True, gc=False):
    """What one step adds to one sequence of one request: always a delta.

    `index` is the sequence in [0, n). `finish_reason` ends that sequence; `error` ends the whole request.
    `stop_reason` is the stop token id (or string) that was hit, None for the model's own end.
    `logprobs` has one entry per id in `token_ids`. `prompt_logprobs` comes once, with the first output: entry 0 is empty.
    """

    request_id: int
    token_ids: Sequence[int] = ()
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    error: ErrorReport | None = None
    metrics: RequestMetrics | None = None
    handoff: dict[str, Plain] | None = None
    extra: dict[str, Plain] | None = None


class Step(Struct, gc=False):
    """What `Engine.step` returns. `again`: call at once; else not until a command or `wake()`."""

    outputs: Sequence[Output]
    again: bool


class RowExtra(Struct, array_like=True, omit_defaults=True):
    """What only some rows of a step batch have."""

    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    error: ErrorReport | None = None
    metrics: RequestMetrics | None = None
    handoff: dict[str, Plain] | None = None
    extra: dict[str, Plain] | None = None


class StepBatch(Struct, gc=False):
    """All that one engine step has for one frontend, in columns. A row is one sequence of one request.

    client_ids: [rows]. token_ids: flat, row after row. counts: [rows] tokens per row, None = one each.
    indexes: [rows] sequence numbers, None = all 0. finishes: (row, finish code, stop reason) of the rows that end.
    extras: (row, RowExtra) of the rows that have any.
    """

    client_ids: Sequence[int]
    token_ids: Sequence[int]
    counts: Sequence[int] | None = None
    indexes: Sequence[int] | None = None
    finishes: Sequence[tuple[int, int, int | str | None]] = ()
    extras: Sequence[tuple[int, RowExtra]] = ()


class IterationStats(Struct, kw_only=True, omit_defaults=True):
    """An engine's own numbers: gauges now, and totals since start."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    last_step_s: float = 0.0
    extra: dict[str, Plain] = field(default_factory=dict)


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What an engine says of itself once it is ready; None = the engine checks by itself.

    model_dir: the resolved directory. tokenizer: a directory or hub id for `text.load_tokenizer`, None = none.
    max_seq_len: prompt and new tokens together. sampling_defaults: field -> value, used where a caller gives no
    SamplingParams. supports: the non-default fields of SamplingParams and GenerationRequest that it honours.
    controls: the methods that `control()` may call.
    """

    model: str
    model_dir: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    max_seq_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, Plain] = field(default_factory=dict)
    supports: frozenset[str] = frozenset()
    controls: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------------- frames


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    client_id: int
    request: GenerationRequest


class Abort(Struct, frozen=True, array_like=True, tag="abort", gc=False):
    """Ends one request, or all of the session's where `client_id` is None."""

    client_id: int | None


class Control(Struct, frozen=True, array_like=True, tag="control"):
    """`ranks`: None = all. `call_id` is the frontend's own counter."""

    call_id: int
    method: str
    args: Sequence[Plain] = ()
    ranks: tuple[int, ...] | None = None


class Goodbye(Struct, frozen=True, array_like=True, tag="goodbye"):
    """A frontend leaves: its requests are aborted and its session ends."""


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the engine world; taken from the owner's session alone."""


class ControlReply(Struct, frozen=True, array_like=True, tag="reply"):
    """`values`: one per rank asked. `error` is set where the call failed or was refused."""

    call_id: int
    values: Sequence[Plain] = ()
    error: str | None = None


class Stopping(Struct, frozen=True, array_like=True, tag="stopping"):
    """The engine goes down in an orderly way; silence after this is no death."""


class Obituary(Struct, frozen=True, array_like=True, tag="obituary"):
    """The engine generation is dead."""

    message: str
    rank: int | None = None
    exitcode: int | None = None
    traceback: str | None = None
    stderr_tail: str | None = None


class RankState(enum.IntEnum):
    RUNNING = 0
    STOPPED = 1
    GONE = 2


class Beat(Struct, frozen=True, array_like=True, tag="beat", gc=False):
    """The watcher's sign of life. `number` rises strictly. `steps`: the engine's step counter. `busy`: work is pending.

    `states`, `cpu_s`: one per rank.
    """

    number: int
    steps: int
    busy: bool
    states: tuple[RankState, ...] = ()
    cpu_s: tuple[float, ...] = ()


UpMessage: TypeAlias = Submit | Abort | Control | Goodbye | Stop
DownMessage: TypeAlias = StepBatch | ControlReply | Stopping | Obituary


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Opens a session. Its layout is frozen: a frontend of any version can be refused in words.

    peer: the port's PeerId. nonce: 16 random bytes, returned in Welcome. owner: the secret of the world's owner, or empty.
    """

    min_version: int
    max_version: int
    peer: bytes
    nonce: bytes
    owner: bytes = b""


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """Answers Hello. frontend_id: in [0, 32767), the high 16 bits of the session's client ids."""

    nonce: bytes
    session: int
    frontend_id: int
    version: int
    window_frames: int
    window_bytes: int
    info: EngineInfo


class Refuse(Struct, frozen=True, array_like=True, tag="refuse"):
    """Answers Hello where the engine does not take it; frozen as Hello is."""

    nonce: bytes
    reason: str
    min_version: int
    max_version: int


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """Answers a frame of a session that the engine ended."""

    reason: str


HandshakeMessage: TypeAlias = Hello | Welcome | Refuse | Gone
