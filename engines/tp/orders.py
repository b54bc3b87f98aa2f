"""What rank 0 tells the others to do, each as one array of int32: the kind of order, then what it is about."""

from array import array
from collections.abc import Iterable
from enum import IntEnum
from itertools import accumulate, pairwise

from tllm_core.engines.tp.batch import ScheduledBatch


class Order(IntEnum):
    """What the others do as rank 0 does it itself; the names are those of the runner's methods."""

    END = 0
    EXECUTE = 1
    CLEAR = 2
    RENEW_CACHE = 3
    SLEEP = 4
    WAKEUP = 5
    UPDATE = 6
    START_PROFILE = 7
    STOP_PROFILE = 8


def order_of(kind: Order, numbers: Iterable[int] = ()) -> "array[int]":
    return array("i", (kind, *numbers))


def order_with_text(kind: Order, text: str) -> "array[int]":
    return array("i", (kind, *text.encode("utf-8", "surrogatepass")))


def text_of(order: "array[int]") -> str:
    return bytes(order[1:].tolist()).decode("utf-8", "surrogatepass")


def order_to_execute(batch: ScheduledBatch) -> "array[int]":
    """The kind and five counts, then field after field: of block tables the lengths first, and their blocks at the end."""
    tables = batch.block_tables
    counts = (len(tables), len(batch.logits_rows), 2 * len(batch.copies), len(batch.token_ids), batch.num_decodes)
    order = array("i", (Order.EXECUTE, *counts))
    order.extend(batch.query_lens)
    order.extend(batch.context_lens)
    order.extend(map(len, tables))
    order.extend(batch.logits_rows)
    for copy in batch.copies:
        order.extend(copy)
    order.extend(batch.token_ids)
    for table in tables:
        order.extend(table)
    return order


def batch_of(order: "array[int]") -> ScheduledBatch:
    """The batch of `order_to_execute`."""
    _, sequences, rows, copies, tokens, num_decodes = order[:6]
    ends = accumulate((sequences, sequences, sequences, rows, copies, tokens), initial=6)
    *numbers, token_ids = (order[at:end] for at, end in pairwise(ends))
    query_lens, context_lens, lengths, logits_rows, copied = (part.tolist() for part in numbers)
    bounds = pairwise(accumulate(lengths, initial=6 + 3 * sequences + rows + copies + tokens))
    return ScheduledBatch(
        token_ids=token_ids,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=[order[at:end].tolist() for at, end in bounds],
        logits_rows=logits_rows,
        num_decodes=num_decodes,
        copies=list(zip(copied[::2], copied[1::2], strict=True)),
    )
