"""What one session is to be sent of a step: rows collected into columns, and parked where its lane has no room."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from tllm_core.contracts.messages import FINISH_CODES, ErrorReport, FinishReason, Output, RowExtra, StepBatch

ERROR = FINISH_CODES["error"]
ROW_BYTES = 64
"""What a parked row is counted as, besides its tokens and extras."""

NO_EXTRA = RowExtra()

Finish = tuple[int, int | str | None]
"""Finish code and stop reason."""


def is_plain(output: Output) -> bool:
    """Whether it adds tokens and nothing else."""
    return (
        output.finish_reason is None
        and output.logprobs is None
        and output.metrics is None
        and output.extra is None
        and output.error is None
        and output.prompt_logprobs is None
        and output.handoff is None
    )


class Rows:
    """Collects the rows of one step for one session."""

    __slots__ = ("client_ids", "counts", "extras", "finishes", "indexes", "token_ids")

    def __init__(self) -> None:
        self.client_ids: list[int] = []
        self.token_ids: list[int] = []
        self.counts: list[int] | None = None
        self.indexes: list[int] | None = None
        self.finishes: list[tuple[int, int, int | str | None]] = []
        self.extras: list[tuple[int, RowExtra]] = []

    def add(self, client_id: int, output: Output) -> None:
        """Appends one output; this is the hot path."""
        token_ids = output.token_ids
        if self.counts is not None or len(token_ids) != 1:
            self._count(token_ids)
        else:
            self.token_ids.append(token_ids[0])
        if self.indexes is not None or output.index:
            self._index(output.index)
        self.client_ids.append(client_id)
        if not is_plain(output):
            self._mark(len(self.client_ids) - 1, output)

    def fill(self, client_ids: list[int], outputs: Sequence[Output]) -> bool:
        """`add` for a whole step in half the time, where nothing was added before and every output is one token of a first
        sequence. Otherwise it does nothing and returns False.
        """
        try:
            token_ids = [token for (token,) in [output.token_ids for output in outputs]]
        except ValueError:
            return False
        indexes = [output.index for output in outputs]
        if self.client_ids or any(indexes):
            return False
        self.client_ids, self.token_ids = client_ids, token_ids
        # `is_plain`, written out: a call per row would take longer than all the rest.
        rare = [
            (row, output)
            for row, output in enumerate(outputs)
            if output.finish_reason is not None
            or output.logprobs is not None
            or output.metrics is not None
            or output.extra is not None
            or output.error is not None
            or output.prompt_logprobs is not None
            or output.handoff is not None
        ]
        for row, output in rare:
            self._mark(row, output)
        return True

    def _count(self, token_ids: Sequence[int]) -> None:
        if self.counts is None:
            self.counts = [1] * len(self.client_ids)
        self.counts.append(len(token_ids))
        self.token_ids.extend(token_ids)

    def _index(self, index: int) -> None:
        if self.indexes is None:
            self.indexes = [0] * len(self.client_ids)
        self.indexes.append(index)

    def _mark(self, row: int, output: Output) -> None:
        if output.finish_reason is not None:
            self.finishes.append((row, FINISH_CODES[output.finish_reason], output.stop_reason))
        elif output.error is not None:
            self.finishes.append((row, ERROR, None))
        extra = RowExtra(
            output.logprobs, output.prompt_logprobs, output.error, output.metrics, output.handoff, output.extra
        )
        if extra != NO_EXTRA:
            self.extras.append((row, extra))

    def end(self, client_id: int, index: int, reason: FinishReason) -> None:
        """A row without tokens that ends one sequence."""
        self.add(client_id, Output(request_id=0, index=index, finish_reason=reason))

    def fail(self, client_id: int, error: ErrorReport) -> None:
        """A row without tokens that ends a whole request."""
        self.add(client_id, Output(request_id=0, error=error))

    def take(self) -> StepBatch:
        """All rows, as columns that nobody changes any more; the next `add` begins anew."""
        batch = StepBatch(self.client_ids, self.token_ids, self.counts, self.indexes, self.finishes, self.extras)
        Rows.__init__(self)
        return batch


class Row(Struct, frozen=True, gc=False):
    """One row of a batch, taken out of its columns."""

    client_id: int
    index: int
    token_ids: Sequence[int]
    finish: Finish | None
    extra: RowExtra | None


def rows_of(batch: StepBatch) -> Iterator[Row]:
    """The rows of a batch, one by one."""
    finishes: dict[int, Finish] = {row: (code, stop_reason) for row, code, stop_reason in batch.finishes}
    extras = dict(batch.extras)
    start = 0
    for row, client_id in enumerate(batch.client_ids):
        end = start + (1 if batch.counts is None else batch.counts[row])
        index = 0 if batch.indexes is None else batch.indexes[row]
        yield Row(client_id, index, batch.token_ids[start:end], finishes.get(row), extras.get(row))
        start = end


class Parked:
    """Rows that a full lane did not take, merged per sequence and in order."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], Row] = {}
        self.size = 0

    def absorb(self, batch: StepBatch) -> None:
        """Appends the batch's rows to what is parked of the same sequences. `size` grows by about their bytes."""
        for row in rows_of(batch):
            key = (row.client_id, row.index)
            # Put last, so that a row with an error comes after all that its request's other sequences have.
            parked = self._rows.pop(key, None)
            self._rows[key] = row if parked is None else merged(parked, row)
            self.size += size_of(row)

    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def keep(self, rows: Sequence[Row]) -> None:
        """Forgets all but these."""
        if len(rows) == len(self._rows):
            return
        self._rows = {(row.client_id, row.index): row for row in rows}
        self.size = sum(size_of(row) for row in rows)

    def __len__(self) -> int:
        return len(self._rows)


def batch_of(rows: Sequence[Row]) -> StepBatch:
    """Puts rows into columns."""
    counts = [len(row.token_ids) for row in rows]
    return StepBatch(
        client_ids=[row.client_id for row in rows],
        token_ids=[token for row in rows for token in row.token_ids],
        counts=None if counts == [1] * len(rows) else counts,
        indexes=[row.index for row in rows] if any(row.index for row in rows) else None,
        finishes=[(at, *row.finish) for at, row in enumerate(rows) if row.finish is not None],
        extras=[(at, row.extra) for at, row in enumerate(rows) if row.extra is not None],
    )


def merged(first: Row, second: Row) -> Row:
    """Two rows of one sequence as one: what came first stays first."""
    tokens = [*first.token_ids, *second.token_ids]
    extra = first.extra if second.extra is None else second.extra
    if first.extra is not None and second.extra is not None:
        extra = merged_extra(first.extra, second.extra)
    return Row(first.client_id, first.index, tokens, second.finish or first.finish, extra)


def merged_extra(first: RowExtra, second: RowExtra) -> RowExtra:
    """Lists are joined; of the rest the later one stands, `extra` key by key."""
    return RowExtra(
        logprobs=[*(first.logprobs or ()), *(second.logprobs or ())] or None,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        error=first.error or second.error,
        metrics=second.metrics or first.metrics,
        handoff=second.handoff or first.handoff,
        extra=second.extra if first.extra is None else {**first.extra, **(second.extra or {})},
    )


def size_of(row: Row) -> int:
    """About how many bytes a row holds."""
    return ROW_BYTES + 4 * len(row.token_ids) + (0 if row.extra is None else _extra_size(row.extra))


def _extra_size(extra: RowExtra) -> int:
    positions = [*(extra.logprobs or ()), *(extra.prompt_logprobs or ())]
    return ROW_BYTES + 24 * sum(map(len, positions)) + _plain_size(extra.extra) + _plain_size(extra.handoff)


def _plain_size(value: object) -> int:
    match value:
        case str() | bytes() | bytearray() | memoryview():
            return 8 + len(value)
        case dict():
            return 8 + sum(_plain_size(key) + _plain_size(item) for key, item in value.items())
        case list() | tuple():
            return 8 + sum(map(_plain_size, value))
    return 8
