"""GenerationResult: one mailbox, read by sync and async consumers on any thread and loop."""

from __future__ import annotations

import asyncio
import threading
from asyncio import get_running_loop
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import NoReturn, Protocol, Self

from tllm_core.contracts.messages import (
    FinishReason,
    GenerationRequest,
    Logprob,
    Plain,
    RequestMetrics,
    RowExtra,
    TokenIds,
    TokenLogprobs,
)
from tllm_core.errors import ResultBusyError
from tllm_core.ledger.ledger import Finish, Mailbox, Outcome, Tokens, size_of
from tllm_core.ledger.waiting import Deadline, ThreadWaiter, async_waiter, discard


class CompletionOutput:
    """One sequence of a request, as far as its consumer has read.

    token_ids: all so far. token_ids_diff, logprobs_diff: what the iterating consumer had not seen before this update.
    logprobs: per token, token id -> Logprob (the sampled token and the top k). finish_reason: None while it runs.
    """

    __slots__ = (
        "_from",
        "_to",
        "cumulative_logprob",
        "extra",
        "finish_reason",
        "handoff",
        "index",
        "logprobs",
        "metrics",
        "prompt_logprobs",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.prompt_logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics: RequestMetrics | None = None
        self.handoff: dict[str, Plain] | None = None
        self.extra: dict[str, Plain] | None = None
        self._from = 0
        self._to = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._from : self._to]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return [] if self.logprobs is None else self.logprobs[self._from : self._to]

    def add_extra(self, extra: RowExtra) -> None:
        if extra.logprobs is not None:
            if self.logprobs is None:
                self.logprobs, self.cumulative_logprob = [], 0.0
            self.logprobs.extend(map(_by_token, extra.logprobs))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(p[0].logprob for p in extra.logprobs if p)
        if extra.prompt_logprobs is not None:
            self.prompt_logprobs = list(map(_by_token, extra.prompt_logprobs))
        self.metrics = extra.metrics or self.metrics
        self.handoff = extra.handoff or self.handoff
        self.extra = extra.extra or self.extra

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, token_ids={self.token_ids}, finish_reason={self.finish_reason!r}, "
            f"stop_reason={self.stop_reason!r})"
        )


def _by_token(position: TokenLogprobs) -> dict[int, Logprob]:
    return {logprob.token_id: logprob for logprob in position}


class Aborter(Protocol):
    """What a result needs of its executor."""

    def abort(self, client_id: int) -> None: ...
    def drop(self, client_id: int) -> None: ...


class GenerationResult:
    """A request's future and stream in one.

    Any number of `result()`, `aresult()` and `await` may wait for the end; one consumer at a time may iterate, sync or
    async, and gets this same object after each update, with everything that has accumulated since. Errors are raised after
    what had arrived before them, and again each time. Losing the last reference, or leaving `with result:`, aborts; who
    only stops iterating, by `break` or because its task was cancelled, has ended nothing while anybody holds the result, nor
    does a `result()` or `await` that is given up.
    """

    def __init__(self, request: GenerationRequest, mailbox: Mailbox, executor: Aborter) -> None:
        self.request = request
        self.client_id = mailbox.client_id
        self.outputs = [CompletionOutput(index) for index in range(request.sampling.n)]
        self.mailbox = mailbox
        self._executor = executor
        self._lock = threading.Lock()
        self._updates = 0
        self._seen = 0
        self._done: Outcome | None = None
        self._busy = False
        self._iterated = False

    # ------------------------------------------------------------------------------------------------- properties

    @property
    def request_id(self) -> int:
        """The same as `client_id`."""
        return self.client_id

    @property
    def prompt_token_ids(self) -> TokenIds:
        return self.request.prompt_token_ids

    @property
    def finished(self) -> bool:
        """The terminal outcome was reached, and `outputs` holds all that came before it."""
        if not self._iterated:
            self._read()
        return self._done is not None

    def aborted(self) -> bool:
        """It ended by `abort()`: this one's, the executor's, or the loss of its consumer."""
        outcome = self.mailbox.outcome
        return outcome is not None and outcome.reason == "abort"

    # ----------------------------------------------------------------------------------------------- the mailbox

    def _read(self) -> None:
        """Moves what has arrived into `outputs`."""
        box = self.mailbox
        outcome = box.outcome  # before the rows: whoever set it appended them first
        rows = box.rows
        if not rows and outcome is self._done:
            return
        with self._lock:
            append = self.outputs[0].token_ids.append
            while rows:
                item = rows.popleft()
                if type(item) is int:
                    append(item)
                else:
                    self._apply(item)  # type: ignore[arg-type]
            self._updates += 1
            if self._done is None:
                self._done = outcome

    def _apply(self, item: Tokens | Finish) -> None:
        output = self.outputs[item.index]
        if isinstance(item, Finish):
            output.finish_reason, output.stop_reason = item.reason, item.stop_reason
            return
        output.token_ids.extend(item.token_ids)
        if item.extra is not None:
            output.add_extra(item.extra)
            self.mailbox.extra_out += size_of(item.extra)

    def _must_wait(self) -> bool:
        """There is nothing that the iterating consumer has not seen, and more to come."""
        box = self.mailbox
        return not box.rows and box.outcome is None and self._updates == self._seen

    def _advance(self) -> bool:
        """Shows the iterating consumer what there is: True for an update, False at the end. Raises the request's error."""
        self._read()
        done = self._done
        if self._updates != self._seen:
            self._seen = self._updates
            for output in self.outputs:  # what it saw before and what it sees now bound the diffs
                output._from = output._to
                output._to = len(output.token_ids)
            if done is None or done.error is None or self._has_news():
                return True
        self._raise_error()
        return False

    def _has_news(self) -> bool:
        return any(output._to > output._from for output in self.outputs)

    def _raise_error(self) -> None:
        error = None if self._done is None else self._done.fresh_error()
        if error is not None:
            raise error

    def _busy_error(self) -> ResultBusyError:
        return ResultBusyError(
            f"another consumer is iterating over the result of request {self.client_id}; use result() or await beside it"
        )

    # ---------------------------------------------------------------------------------------------------- iterate

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if self._busy:
            raise self._busy_error()
        self._iterated = self._busy = True
        box = self.mailbox
        try:
            while self._must_wait():
                box.waiters.append(waiter := ThreadWaiter())
                if self._must_wait():
                    waiter.wait(None)
            if self._advance():
                return self
        finally:
            self._busy = False
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self._busy:
            raise self._busy_error()
        self._iterated = self._busy = True
        box = self.mailbox
        try:
            while not box.rows and self._must_wait():
                box.waiters.append(future := get_running_loop().create_future())
                if not box.rows and self._must_wait():
                    await future
            if self._advance():
                return self
        except asyncio.CancelledError:
            discard(box.waiters, future)
            raise
        finally:
            self._busy = False
        raise StopAsyncIteration

    # ----------------------------------------------------------------------------------------------------- the end

    def result(self, timeout: float | None = None) -> Self:
        """Waits for the end and returns this object; TimeoutError after `timeout` seconds, the request then lives on.

        `timeout=0` succeeds if the final result is there. Raises the request's error.
        """
        deadline = Deadline(timeout)
        while self._pending():
            waiter = ThreadWaiter()
            self.mailbox.final_waiters.append(waiter)
            if self._pending() and not waiter.wait(deadline.left()):
                discard(self.mailbox.final_waiters, waiter)
                if self._pending():
                    raise TimeoutError(f"request {self.client_id} did not end within {timeout} s; it goes on")
        return self._ended()

    async def aresult(self) -> Self:
        """As `result`, for coroutines; use `asyncio.timeout` around it for a bound."""
        while self._pending():
            future = async_waiter()
            self.mailbox.final_waiters.append(future)
            if self._pending():
                try:
                    await future
                finally:
                    discard(self.mailbox.final_waiters, future)
        return self._ended()

    def _pending(self) -> bool:
        return self.mailbox.outcome is None

    def __await__(self) -> Generator[None, None, Self]:
        return self.aresult().__await__()

    def _ended(self) -> Self:
        self._read()
        if not self._iterated:
            for output in self.outputs:
                output._to = len(output.token_ids)
        self._raise_error()
        return self

    # ------------------------------------------------------------------------------------------------------- abort

    def abort(self) -> None:
        """Ends the request at once, here and in the engine; a quiet no-op where it has ended."""
        self._executor.abort(self.client_id)
        if self.aborted():  # whoever aborts wants to see it, and not only at the next update
            self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        box = getattr(self, "mailbox", None)
        if box is not None and box.outcome is None:
            self._executor.drop(box.client_id)  # only an append: this may run inside any lock

    def __reduce__(self) -> NoReturn:
        """Of copies that share a mailbox each would get a part, and the first to go would abort the request of all."""
        raise TypeError(
            f"{self!r} belongs to its executor and can't be copied or pickled; take what is needed of its outputs"
        )

    def __hash__(self) -> int:
        return self.client_id

    def __repr__(self) -> str:
        state = "running" if self.mailbox.outcome is None else self.mailbox.outcome.reason
        lengths: Sequence[int] = [len(output.token_ids) for output in self.outputs]
        return f"GenerationResult(client_id={self.client_id}, {state}, tokens={lengths})"
