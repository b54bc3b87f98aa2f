"""What the scheduler hands to the runner: one step's work as plain numbers, so that it can cross to other ranks."""

from __future__ import annotations

from array import array

from msgspec import Struct


class ScheduledBatch(Struct, kw_only=True, gc=False):
    """One forward pass: sequences that decode first (one token each), then chunks of prompts.

    token_ids: int32, flat [tokens], sequence after sequence. query_lens: [sequences] tokens of each in this step, >= 1.
    context_lens: [sequences] tokens of each that are in the cache already. block_tables: per sequence the blocks that
    cover context and query, ceil((context + query) / block_size) of them; token position p lives in block
    `table[p // block_size]` at row `p % block_size`, or nowhere, if no layer's window reaches back to it: then another block
    of the sequence stands there. logits_rows: rising indexes into `token_ids` of the tokens whose logits are wanted.
    num_decodes: how many sequences from the front are decoding. copies: (from, to) of blocks whose content is copied before
    anything is written, as if all were read before any copy is made; no block is copied to twice.
    """

    token_ids: array[int]
    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    logits_rows: list[int]
    num_decodes: int = 0
    copies: list[tuple[int, int]] = []
