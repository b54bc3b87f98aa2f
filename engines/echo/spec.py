"""What the echo engine is called, how it is set, and which faults it can be told to have."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from tllm_core.contracts.interfaces import EngineSpec

MAX_RANKS = 1024

FaultPoint = Literal["construct", "prepare", "start", "submit", "abort", "step", "control", "follow", "close"]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
FaultKind = Literal["raise", "request_error", "exit", "kill", "stop", "hang", "spin", "wait_for_child", "hold_gil"]


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong, at a chosen call of the engine.

    at: which call. A fault with a `token` counts only the calls about a request whose prompt holds that id (for "step":
    steps in which such a request runs); without one it counts every call.
    after: how many counted calls pass unharmed first. times: how often it then happens; None = on every later call.
    rank: where.

    do: what happens.
      raise          RuntimeError(message)
      request_error  RequestError(message); in a step: an error output for each request that the fault is about
      exit           os._exit(exitcode), without any clean-up
      kill           the process sends itself `signal` (SIGKILL)
      stop           the process stops itself (SIGSTOP) until somebody continues it
      hang           the call blocks for `seconds` without using the CPU
      wait_for_child the call waits for a process of its own that burns CPU for `seconds`, as for a compiler
      spin           the call burns CPU for `seconds`; other threads run
      hold_gil       the call holds the interpreter's lock for `seconds`; no other thread runs

    With the inline launcher exit, kill, stop and hold_gil hit the caller's own process.
    """

    at: FaultPoint
    do: FaultKind
    after: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    times: Count | None = None
    token: TokenId | None = None
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    message: str = "echo fault"
    exitcode: Annotated[int, Meta(ge=0, le=255)] = 3
    signal: Annotated[int, Meta(ge=1, le=64)] = 9
    seconds: Seconds = 3600.0


class EchoSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the echo engine.

    step_interval_s: least time between two steps, 0 = as fast as it can. load_delay_s: how long start-up takes.
    max_batch_size: sequences that run at once; what is above waits in order. max_seq_len: prompt and new tokens together.
    tokens_per_step: tokens that a sequence gains per step. eos_token_id: ends a sequence as a model's own end would.
    world_size: ranks; those above 0 idle.
    """

    step_interval_s: Seconds = 0.0
    load_delay_s: Seconds = 0.0
    max_batch_size: Count = 256
    max_seq_len: Count = 4096
    vocab_size: Count = 32000
    tokens_per_step: Count = 1
    eos_token_id: TokenId | None = None
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    faults: tuple[Fault, ...] = ()


def world_size(settings: EchoSettings) -> int:
    return settings.world_size


SPEC = EngineSpec(
    name="echo",
    settings_type=EchoSettings,
    load="tllm_core.engines.echo.engine:EchoEngine",
    world_size="tllm_core.engines.echo.spec:world_size",
    prepare="tllm_core.engines.echo.engine:prepare",
)
