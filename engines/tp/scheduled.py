"""A step as it is put together, and as the engine gets it."""

from array import array
from typing import NamedTuple

from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.sequence import Sequence


class PromptRows(NamedTuple):
    """Rows [first, first + length) of the logits are those of the sequence's prompt tokens from `position` on."""

    sequence: Sequence
    first: int
    length: int
    position: int


class Probe(NamedTuple):
    """Row `row` of the logits is that of the last token of a chunk after which more of the prompt is to come: where it
    is not finite, what the chunk left in the cache is not either."""

    sequence: Sequence
    row: int


class Scheduled(NamedTuple):
    """A step. sampled: who gains a token, in the order of their rows of the logits. sample_rows: which rows these are,
    None = all of them; siblings that begin share one. prompt_rows: rows that are wanted for prompt logprobs."""

    batch: ScheduledBatch
    sampled: list[Sequence]
    sample_rows: list[int] | None
    prompt_rows: list[PromptRows]
    probes: list[Probe]
    prompt_tokens: int


class StepBuilder:
    """A step while it is put together: decoding sequences first."""

    def __init__(self, decodes: list[Sequence]) -> None:
        count = len(decodes)
        self.num_decodes = count
        self.token_ids = array("i", [sequence.token_ids[-1] for sequence in decodes])
        self.query_lens = [1] * count
        self.context_lens = [sequence.computed for sequence in decodes]
        self.block_tables = [sequence.blocks for sequence in decodes]
        self.logits_rows = list(range(count))
        self.sampled = decodes
        self.sample_rows = list(range(count))
        self.prompt_rows: list[PromptRows] = []
        self.probes: list[Probe] = []
        self._has_siblings = False
        for sequence in decodes:
            sequence.computed += 1

    def add_chunk(self, sequence: Sequence, length: int, pool: BlockPool) -> None:
        """The next `length` tokens of a prompt, or of what a preempted sequence had."""
        begin, first_row = sequence.computed, len(self.token_ids)
        end = begin + length
        self.token_ids.extend(sequence.token_ids[begin:end])
        self.query_lens.append(length)
        self.context_lens.append(begin)
        self.block_tables.append(sequence.blocks[: pool.blocks_for(end)])
        sequence.computed = end
        if sequence.prompt_row is not None:
            self._want_prompt_rows(sequence, begin, end, first_row)
        if sequence.owed:
            self._want_probe(sequence, first_row + length - 1)
        else:
            self.sample_rows.append(len(self.logits_rows))
            self.logits_rows.append(first_row + length - 1)
            self.sampled.append(sequence)

    def add_sibling(self, sequence: Sequence) -> None:
        """One that begins with the sequence which was added last."""
        self._has_siblings = True
        self.sampled.append(sequence)
        self.sample_rows.append(self.sample_rows[-1])

    def _want_prompt_rows(self, sequence: Sequence, begin: int, end: int, first_row: int) -> None:
        """Row p tells of prompt token p + 1, so that the last prompt token's row is none of them."""
        last = sequence.prompt_len - 1
        known = sequence.prompt_row or 0
        wanted = range(max(begin, known), min(end, last))
        if wanted:
            self.prompt_rows.append(PromptRows(sequence, len(self.logits_rows), len(wanted), wanted.start))
            self.logits_rows.extend(range(first_row + wanted.start - begin, first_row + wanted.stop - begin))
        sequence.prompt_row = max(end, known) if end < last else None

    def _want_probe(self, sequence: Sequence, row: int) -> None:
        if not self.logits_rows or self.logits_rows[-1] != row:
            self.logits_rows.append(row)
        self.probes.append(Probe(sequence, len(self.logits_rows) - 1))

    def result(self, copies: list[tuple[int, int]]) -> Scheduled:
        """The step, which begins with `copies` of blocks."""
        batch = ScheduledBatch(
            token_ids=self.token_ids,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            logits_rows=self.logits_rows,
            num_decodes=self.num_decodes,
            copies=copies,
        )
        rows = self.sample_rows if self.prompt_rows or self.probes or self._has_siblings else None
        tokens = len(self.token_ids) - self.num_decodes
        return Scheduled(batch, self.sampled, rows, self.prompt_rows, self.probes, tokens)
