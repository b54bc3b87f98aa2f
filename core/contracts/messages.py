"""The protocol: what requests, outputs and every frame's content are.

All are msgspec Structs; nothing here is ever pickled. Those that cross a process boundary are encoded as arrays, so a
field is only ever appended, with a default; a change of meaning raises `WIRE_VERSION` (`wire/header.py`).
"""

import enum
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from tllm_core.contracts.guided import GuidedDecoding as GuidedDecoding
from tllm_core.contracts.sampling import SamplingParams as SamplingParams
from tllm_core.contracts.tokens import MAX_TOKEN_ID as MAX_TOKEN_ID
from tllm_core.contracts.tokens import TokenIds as TokenIds
from tllm_core.errors import Cause

Plain: TypeAlias = Any
"""None, bool, int, float, str, bytes, and lists and dicts (with string keys) of them."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "error"]
FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort", "timeout", "error")
"""A finish code on the wire is the index in this tuple."""
FINISH_CODES: dict[FinishReason | None, int] = {reason: code for code, reason in enumerate(FINISH_REASONS)}


# --------------------------------------------------------------------------------------------------- requests


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


class KvEvent(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What became of blocks of an engine's KV cache.

    kind: "stored" = they hold, or are about to be given, keys and values; "removed" = what they held can't be used any
    more; "cleared" = the same of every block that no running request owns. blocks: the engine's own numbers, in order.
    tokens: how many tokens were stored. hashes: of the content of each block chained with all before it, for engines that
    find prefixes by them, else empty. parent: the hash before the first of them, None at the start of a prompt.
    """

    kind: Literal["stored", "removed", "cleared"]
    blocks: tuple[int, ...] = ()
    tokens: int = 0
    hashes: tuple[int, ...] = ()
    parent: int | None = None


class KvEvents(Struct, frozen=True, array_like=True):
    """Events in their order. next: the number of the event after the last of them, to ask with the next time.

    dropped: how many that were asked for were not kept so long. more: there were more than one answer holds; ask again.
    """

    events: tuple[KvEvent, ...]
    next: int
    dropped: int = 0
    more: bool = False


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
    """`ranks`: None = all. `call_id` is the frontend's own counter.

    timeout_s: how long the caller waits for the answer, None = without end. The call is not ended by it; an engine that
    runs it is not taken for hung meanwhile.
    """

    call_id: int
    method: str
    args: Sequence[Plain] = ()
    ranks: tuple[int, ...] | None = None
    timeout_s: float | None = None


class Goodbye(Struct, frozen=True, array_like=True, tag="goodbye"):
    """A frontend leaves: its requests are aborted and its session ends."""


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the engine world; taken from the owner's session alone."""


class Introduce(Struct, frozen=True, array_like=True, tag="introduce", gc=False):
    """A frontend's process, so that an engine on the same host notices its end at once.

    host: the boot and the pid namespace in which `pid` and `start_time` (as in `Identity`) mean something.
    """

    host: str
    pid: int
    start_time: int


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

    def cause(self) -> Cause:
        return Cause(
            self.message, rank=self.rank, exitcode=self.exitcode, traceback=self.traceback, stderr_tail=self.stderr_tail
        )


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


UpMessage: TypeAlias = Submit | Abort | Control | Goodbye | Stop | Introduce
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
    max_message_bytes: int
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
