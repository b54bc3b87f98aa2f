"""Every pluggy hook, in the order of a process's life. An implementation may take any subset of the arguments.

Transports, engines and launchers are not hooks: they are classes that entry points name (`interfaces.py`). Hooks are for
what cuts across them. Plugins load when `[plugins] enable` names them, in the frontend process. None of these hooks is
called per token: per-request ones return a callable, and observers see whole batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

from tllm_core.contracts.messages import EngineInfo, GenerationRequest, StepBatch

if TYPE_CHECKING:
    from tllm_core.executor import GenerationExecutor

PROJECT = "tllm_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tllm_add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add verbs to `tllm`. Set `run=callable(arguments) -> int` as a default of each sub-parser."""


@hookspec
def tllm_executor_started(executor: GenerationExecutor) -> None:
    """The engine is ready and the executor takes requests."""


@hookspec(firstresult=True)
def tllm_admit(request: GenerationRequest, in_flight: int) -> str | None:
    """Return why there is no room for the request now, or None. Stops at the first reason, which the caller gets as Overloaded.

    in_flight: requests of this executor. `generate` waits for one of them to end and asks again, and gives up where there is
    none. Raise RequestError to refuse a request for good, whatever room there is.
    """


@hookspec(firstresult=True)
def tllm_filter_request(request: GenerationRequest, info: EngineInfo) -> GenerationRequest | None:
    """Return a request to use instead, or None. Stops at the first replacement. Raise RequestError to refuse it."""


@hookspec
def tllm_filter_result(request: GenerationRequest) -> Callable[[Any], None] | None:
    """Return a callable that is given the GenerationResult after each update, before its consumer sees it; or None.

    It is called on the thread of a consumer, once per update and never on two threads at once, and may change `outputs`. Who
    only waits for the end reads once, so that there is one update. It may call whatever the result has but iterate: `abort()`
    ends the request, which is an update too (finish reason "abort"; the consumer gets the tokens up to there with it); before
    the end `finished` is False and `result(0)` raises TimeoutError. Until it returns nobody gets the update, so it must not
    wait for another consumer of this result, which may be waiting for it. One that raises is logged and not called again for
    this request.
    """


@hookspec
def tllm_batch_delivered(batch: StepBatch, delivered_at: float) -> None:
    """A step's rows are in their mailboxes. `delivered_at`: monotonic seconds. Observers that raise are detached once.

    Called without any lock, on the thread that reads for everybody: it may submit and abort, and must not wait for a result or
    a control call, which would wait for this thread.
    """


@hookspec
def tllm_request_settled(client_id: int, outcome: str) -> None:
    """A request reached its one terminal outcome: a finish reason or an error's class name.

    Called as `tllm_batch_delivered` is, or on the thread that aborted the request or shut the executor down; no more may be
    waited for.
    """


@hookspec
def tllm_executor_stopped(executor: GenerationExecutor) -> None:
    """The executor was shut down; nothing is pending."""
