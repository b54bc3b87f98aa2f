"""A result that plugins filter: each update is shown to them before a consumer gets it. Results without filters pay nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Self, TypeAlias

from tllm_core.contracts.messages import GenerationRequest
from tllm_core.errors import ResultBusyError
from tllm_core.ledger.ledger import Mailbox
from tllm_core.ledger.result import Aborter, GenerationResult

log = logging.getLogger("tllm_core")

ResultFilter: TypeAlias = "Callable[[GenerationResult], None]"


class _Filter:
    """One filter, and the number of the last update that it was given."""

    __slots__ = ("seen", "show")

    def __init__(self, result_filter: ResultFilter) -> None:
        self.show = result_filter
        self.seen = 0


class FilteredResult(GenerationResult):
    """A GenerationResult whose filters see each update once, in their order and on one thread at a time, before any consumer.

    They may read and abort it: what is held meanwhile lets their own thread pass. The end that an abort brings is one more
    update for those that had seen the one before; the consumer gets both as one, tokens and finish reason "abort".
    """

    def __init__(
        self, request: GenerationRequest, mailbox: Mailbox, executor: Aborter, filters: Sequence[ResultFilter]
    ) -> None:
        super().__init__(request, mailbox, executor)
        self._filters = [_Filter(result_filter) for result_filter in filters]
        self._turn = threading.Lock()
        """Held from taking an update until all filters have seen it."""
        self._filtering: int | None = None
        """The thread that has the turn."""
        self._all_seen = False
        """The last update too."""

    @property
    def finished(self) -> bool:
        """As for any result; for others than its filters only once these have seen the end."""
        return super().finished and (self._all_seen or self._in_filter())

    def _in_filter(self) -> bool:
        return self._filtering == get_ident()

    def _read(self) -> None:
        if not self._in_filter():
            with self._turn:
                self._take_turn()
        elif not self._pending():
            # Before the end a filter sees the update that it was called for: could it take more, it would owe itself another
            # call, and a slow one would keep a stream from its consumer until its end.
            super()._read()

    def _take_turn(self) -> None:
        self._filtering = get_ident()
        try:
            super()._read()
            while self._show() and not self._pending():
                super()._read()
            self._all_seen = self._done is not None
        finally:
            self._filtering = None

    def _show(self) -> bool:
        """Gives each filter the update that it has not seen; False where there is none."""
        owed = [each for each in self._filters if each.seen != self._updates]
        for each in owed:
            each.seen = self._updates
            try:
                each.show(self)
            except Exception:
                self._filters.remove(each)
                log.exception("a result filter raised and was detached from request %d", self.client_id)
        return bool(owed)

    def abort(self) -> None:
        """As for any result. Where another thread is in a filter, `outputs` show the end once that has returned."""
        self._executor.abort(self.client_id)
        if not self.aborted():
            return
        if self._in_filter():
            self._read()
        elif self._turn.acquire(blocking=False):  # a filter that waits for whoever aborts must not be waited for
            try:
                self._take_turn()
            finally:
                self._turn.release()

    def __next__(self) -> Self:
        self._refuse_filters()
        return super().__next__()

    async def __anext__(self) -> Self:
        self._refuse_filters()
        return await super().__anext__()

    def _refuse_filters(self) -> None:
        if self._in_filter():
            raise ResultBusyError(
                f"a result filter iterates over request {self.client_id}; it is given each update, and is to return"
            )
