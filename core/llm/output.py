"""RequestOutput: a GenerationResult with text, for any number of waiters and one iterating consumer.

Whoever waits also reads: there is no thread that detokenizes. Where several wait for one output, one of them leads, which
means that its waiter is in the mailbox; whenever it stops waiting it wakes the others, and one of those leads on. So stop
strings are found, and their requests aborted, as soon as they arrive, whichever way the caller waits.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import NoReturn, Self

from tllm_core.contracts.messages import TokenIds
from tllm_core.errors import RequestError, ResultBusyError, TllmError
from tllm_core.ledger.ledger import Waiter
from tllm_core.ledger.result import GenerationResult
from tllm_core.ledger.waiting import Deadline, ThreadWaiter, async_waiter, discard, wake_all
from tllm_core.llm.completion import TextCompletionOutput
from tllm_core.text import SequenceText

log = logging.getLogger("tllm_core")

Condition = Callable[[], bool]


class RequestOutput:
    """A request's future and stream in one, as GenerationResult, with text.

    Iterate over it (`for`, `async for`; one consumer at a time) and get this same object after each update that shows
    something new; or wait for the end with `result()`, `aresult()` or `await`. Errors are raised after what had arrived
    before them, and again each time. Losing the last reference, or leaving `with output:`, aborts.
    """

    def __init__(
        self, result: GenerationResult, prompt: str | None, sequences: list[SequenceText], *, has_stops: bool
    ) -> None:
        self.prompt = prompt
        self.outputs = [TextCompletionOutput(index, sequence) for index, sequence in enumerate(sequences)]
        self._result = result
        self._box = result.mailbox
        self._has_stops = has_stops
        self._lock = threading.Lock()
        self._leader: Waiter | None = None
        self._followers: list[Waiter] = []
        self._updates = 0
        self._seen = 0
        self._finished = False
        self._cut = False
        """Every sequence has its end, by stop strings or by itself, though the engine's request may not have."""
        self._failure: RequestError | None = None
        self._busy = False
        self._iterated = False

    # ------------------------------------------------------------------------------------------------- properties

    @property
    def client_id(self) -> int:
        return self._result.client_id

    @property
    def request_id(self) -> int:
        """The same as `client_id`."""
        return self._result.client_id

    @property
    def prompt_token_ids(self) -> TokenIds:
        return self._result.prompt_token_ids

    @property
    def finished(self) -> bool:
        """The end was reached, and `outputs` holds all that came before it."""
        if not self._iterated:
            self._check(self._at_end)
        return self._finished

    def aborted(self) -> bool:
        """It ended by `abort()`; a request that a stop string ended was not aborted."""
        return not self._cut and self._failure is None and self._result.aborted()

    # ---------------------------------------------------------------------------------------------------- the text

    def _take(self) -> None:
        """Moves what has arrived into `outputs`, once; under the lock."""
        if self._finished:
            return
        ended = self._result.finished
        try:
            news = [
                output.take(source, ended) for output, source in zip(self.outputs, self._result.outputs, strict=True)
            ]
        except Exception as error:  # one request's text must not harm another's
            log.exception("the text of request %d can't be made", self.client_id)
            self._failure = RequestError(f"the tokens can't be made into text: {error}", client_id=self.client_id)
        reasons = {output.finish_reason for output in self.outputs}
        done = None not in reasons
        self._cut = done and not ended and "abort" not in reasons
        self._finished = ended or done or self._failure is not None
        if self._finished or any(news):
            self._updates += 1

    def _at_end(self) -> bool:
        return self._finished

    def _has_update(self) -> bool:
        return self._finished or self._updates != self._seen

    def _error(self) -> TllmError | None:
        if self._failure is not None:
            return copy.copy(self._failure)
        outcome = None if self._cut or not self._finished else self._box.outcome
        return None if outcome is None else outcome.fresh_error()

    def _raise_error(self) -> None:
        error = self._error()
        if error is not None:
            raise error

    # ----------------------------------------------------------------------------------------------------- waiting

    def _check(self, condition: Condition) -> bool:
        """Reads, and says whether `condition` holds now."""
        with self._lock:
            running = not self._finished
            self._take()
            holds = condition()
            early = running and self._finished and self._box.outcome is None
        if early:
            self._result.abort()
        return holds

    def _leave(self, waiter: Waiter, condition: Condition) -> bool:
        """Leaves `waiter` to be woken by news; False, and nothing left, where `condition` holds already.

        Whether it was woken for its own condition it must see for itself, after `take_back`.
        """
        while not self._check(condition):
            with self._lock:
                if self._post(waiter, condition):
                    return True
        return False

    def _post(self, waiter: Waiter, condition: Condition) -> bool:
        """False where something has arrived that nobody has read; under the lock."""
        if condition():
            return False
        box = self._box
        if (
            condition == self._at_end and not self._has_stops
        ):  # nothing can end it early: no need to read before the end
            box.final_waiters.append(waiter)
            return box.outcome is None
        if self._leader is not None:
            self._followers.append(waiter)
            return True
        box.waiters.append(waiter)
        if box.rows or box.outcome is not None:
            return False
        self._leader = waiter
        return True

    def leave_until_end(self, waiter: Waiter) -> bool:
        """Leaves a waiter for the end, to be woken by news perhaps several times; False if it has ended. Then `take_back`."""
        return self._leave(waiter, self._at_end)

    def take_back(self, waiter: Waiter) -> None:
        """After the wait, however it ended; whoever else waits is woken and finds a new leader."""
        woken: list[Waiter] = []
        with self._lock:
            if self._leader is waiter:
                discard(self._box.waiters, waiter)
                self._leader = None
                woken, self._followers = self._followers, woken
            elif waiter in self._followers:
                self._followers.remove(waiter)
            else:
                discard(self._box.final_waiters, waiter)
        wake_all(woken)

    def _wait(self, condition: Condition, timeout: float | None = None) -> bool:
        """Blocks this thread until `condition` holds; False after `timeout` seconds."""
        deadline = Deadline(timeout)
        while self._leave(waiter := ThreadWaiter(), condition):
            try:
                woken = waiter.wait(deadline.left())
            finally:
                self.take_back(waiter)
            if not woken:
                return self._check(condition)
        return True

    async def _await(self, condition: Condition) -> None:
        while self._leave(waiter := async_waiter(), condition):
            try:
                await waiter
            finally:
                self.take_back(waiter)

    # ---------------------------------------------------------------------------------------------------- iterate

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        self._begin()
        try:
            self._wait(self._has_update)
            if self._advance():
                return self
        finally:
            self._busy = False
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        self._begin()
        try:
            await self._await(self._has_update)
            if self._advance():
                return self
        finally:
            self._busy = False
        raise StopAsyncIteration

    def _begin(self) -> None:
        if self._busy:
            raise ResultBusyError(
                f"another consumer is iterating over the output of request {self.client_id}; "
                "use result() or await beside it"
            )
        self._iterated = self._busy = True

    def _advance(self) -> bool:
        """Shows the iterating consumer what there is: True for an update, False at the end. Raises the request's error."""
        with self._lock:
            if self._updates != self._seen:
                self._seen = self._updates
                for output in self.outputs:
                    output.show()
                if self._error() is None or any(output.has_news() for output in self.outputs):
                    return True
        self._raise_error()
        return False

    # ----------------------------------------------------------------------------------------------------- the end

    def result(self, timeout: float | None = None) -> Self:
        """Waits for the end and returns this object; TimeoutError after `timeout` seconds, the request then lives on.

        `timeout=0` succeeds if the final result is there. Raises the request's error.
        """
        if not self._wait(self._at_end, timeout):
            raise TimeoutError(f"request {self.client_id} did not end within {timeout} s; it goes on")
        return self._ended()

    async def aresult(self) -> Self:
        """As `result`, for coroutines; use `asyncio.timeout` around it for a bound."""
        await self._await(self._at_end)
        return self._ended()

    def __await__(self) -> Generator[None, None, Self]:
        return self.aresult().__await__()

    def _ended(self) -> Self:
        if not self._iterated:
            with self._lock:
                if self._updates != self._seen:
                    self._seen = self._updates
                    for output in self.outputs:
                        output.show()
        self._raise_error()
        return self

    # ------------------------------------------------------------------------------------------------------- abort

    def abort(self) -> None:
        """Ends the request at once, here and in the engine; a quiet no-op where it has ended."""
        if not self._check(self._at_end):
            self._result.abort()
            self._check(self._at_end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def __reduce__(self) -> NoReturn:
        """As for GenerationResult: there is one that reads."""
        raise TypeError(
            f"the output of request {self.client_id} belongs to its LLM and can't be copied or pickled; "
            "take what is needed of its outputs"
        )

    def __repr__(self) -> str:
        state = "finished" if self._finished else "running"
        return f"RequestOutput(client_id={self.client_id}, {state}, outputs={self.outputs})"
