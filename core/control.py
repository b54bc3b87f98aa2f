"""Control calls: what a frontend asks of the engine itself, in order with its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tllm_core.contracts.messages import EngineInfo, IterationStats, KvEvents, Plain
from tllm_core.contracts.plain import objection
from tllm_core.contracts.values import seconds, shown
from tllm_core.errors import ControlError
from tllm_core.frontend import Frontend
from tllm_core.ledger.ledger import Call
from tllm_core.ledger.waiting import Deadline, ThreadWaiter, async_waiter

MAX_RANK = 2**31 - 1


class ControlCalls:
    """The part of an executor that calls the engine's declared methods."""

    info: EngineInfo
    _frontend: Frontend

    def __init__(self) -> None:
        self._kv_cursor = 0

    def control(
        self, method: str, *args: Plain, ranks: Literal["all"] | Sequence[int] = "all", timeout: float | None = 60.0
    ) -> list[Plain]:
        """Calls one of `info.controls` on the engine's ranks, in order with requests; one value per rank.

        Raises ControlError if it failed, was refused or did not answer within `timeout` seconds (None = wait for ever), and
        for arguments that are no plain data; EngineDeadError at once.
        """
        wait_s = seconds(timeout, ControlError)
        call = self._call(method, args, ranks, wait_s)
        waiter, deadline = ThreadWaiter(), Deadline(wait_s)
        call.waiters.append(waiter)
        while call.outcome is None:
            if not waiter.wait(deadline.left()) and self._frontend.ledger.withdraw_call(call.call_id):
                raise ControlError(f"the engine did not answer {method!r} within {timeout} s")
        return _values(call)

    async def acontrol(self, method: str, *args: Plain, ranks: Literal["all"] | Sequence[int] = "all") -> list[Plain]:
        """As `control`, for coroutines; use `asyncio.timeout` around it for a bound."""
        call = self._call(method, args, ranks)
        try:
            while call.outcome is None:
                waiter = async_waiter()
                call.waiters.append(waiter)
                if call.outcome is None:
                    await waiter
        finally:
            self._frontend.ledger.withdraw_call(call.call_id)
        return _values(call)

    def _call(
        self, method: str, args: Sequence[Plain], ranks: Literal["all"] | Sequence[int], timeout: float | None = None
    ) -> Call:
        self._check_process()
        if (problem := objection(args)) is not None:
            raise ControlError(f"an argument of {shown(method)} {problem}")
        if method != "stats" and method not in self.info.controls:
            known = ", ".join(sorted({"stats", *self.info.controls}))
            raise ControlError(f"the engine of {self.info.model!r} has no control method {method!r}; it has: {known}")
        return self._frontend.call(method, args, _ranks(ranks), timeout)

    def stats(self, timeout: float | None = 10.0) -> IterationStats:
        """The engine's own numbers."""
        return msgspec.convert(self.control("stats", timeout=timeout)[0], IterationStats)

    async def astats(self) -> IterationStats:
        """As `stats`, for coroutines."""
        return msgspec.convert((await self.acontrol("stats"))[0], IterationStats)

    def kv_events(self, since: int | None = None, timeout: float | None = 10.0) -> KvEvents:
        """What became of the engine's KV blocks since this executor's last call, or from event number `since` on.

        The engine keeps a bounded number of events for all frontends: each one reads all of them, and hears in `dropped` of
        those that it came too late for. Raises ControlError where the engine has none, and what `control` raises.
        """
        cursor = self._kv_cursor if since is None else since
        return self._took(self.control("kv_events", cursor, timeout=timeout), since)

    async def akv_events(self, since: int | None = None) -> KvEvents:
        """As `kv_events`, for coroutines."""
        cursor = self._kv_cursor if since is None else since
        return self._took(await self.acontrol("kv_events", cursor), since)

    def _took(self, values: list[Plain], since: int | None) -> KvEvents:
        events = msgspec.convert(values[0], KvEvents)
        if since is None:
            self._kv_cursor = events.next
        return events

    def _check_process(self) -> None:
        """Raises ExecutorClosedError in a process that the executor's own was forked to."""
        raise NotImplementedError


def _ranks(ranks: object) -> tuple[int, ...] | None:
    """None = all. Which of them there are is the engine's to say."""
    if isinstance(ranks, str) and ranks == "all":
        return None
    if isinstance(ranks, Sequence) and all(type(rank) is int and 0 <= rank <= MAX_RANK for rank in ranks):
        return tuple(ranks)
    raise ControlError(f'ranks must be "all" or a list of rank numbers, not {shown(ranks)}')


def _values(call: Call) -> list[Plain]:
    assert call.outcome is not None
    error = call.outcome.fresh_error()
    if error is not None:
        raise error
    return list(call.values)
