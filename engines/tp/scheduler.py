"""Which sequences take part in the next step, and with how many tokens. No torch, no clock.

Every running sequence that decodes gains its token in every step; what is left of the step's token budget goes to
prompts, the most important first, in chunks. Importance is (priority, arrival). Nothing overtakes the head of the queue,
so that a large request waits only until there is room. Where the cache is full, a sequence that needs a block takes it from the
least important one, which gives all of its own back and is computed anew later, its generated tokens included.
"""

from array import array
from bisect import bisect_left, insort
from typing import NamedTuple

from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.kv_events import KvEventLog
from tllm_core.engines.tp.sequence import Sequence, importance
from tllm_core.errors import RequestError


class PromptRows(NamedTuple):
    """Rows [first, first + length) of the logits are those of the sequence's prompt tokens from `position` on."""

    sequence: Sequence
    first: int
    length: int
    position: int


class Scheduled(NamedTuple):
    """A step. sampled: who gains a token, in the order of their rows of the logits. sample_rows: which rows these are,
    None = all of them. prompt_rows: rows that are wanted for prompt logprobs."""

    batch: ScheduledBatch
    sampled: list[Sequence]
    sample_rows: list[int] | None
    prompt_rows: list[PromptRows]
    prompt_tokens: int


class Scheduler:
    """Continuous batching. A sequence waits, computes its prompt, decodes; `remove` ends it at any stage.

    After a step each sequence in `Scheduled.sampled` must have got its token appended, or be removed.
    suspects: blocks that were given back with content which was never seen to be finite; whoever runs the step clears them
    before it, since NaN spoils the next owner even where it is masked.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_seq_len: int,
        events: KvEventLog | None = None,
    ) -> None:
        if max_batched_tokens < max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs: each decodes a token per step")
        self.pool = pool
        self.max_num_seqs, self.max_batched_tokens = max_num_seqs, max_batched_tokens
        self.max_seq_len = min(max_seq_len, pool.capacity)
        self.preemptions = 0
        self.suspects: list[int] = []
        self.events = KvEventLog(0) if events is None else events
        self._model_limit = max_seq_len
        # All three sorted; of `_waiting` the most important is the last, where a list is cheap to pop.
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pending(self) -> bool:
        return bool(self._decoding or self._prefilling or self._waiting)

    def length_for(self, prompt: int, max_tokens: int | None) -> int:
        """Prompt and new tokens together, at most; `max_tokens=None` is what fits.

        Raises RequestError where that can never fit, with all numbers.
        """
        limit = self.max_seq_len
        if prompt + (max_tokens or 1) <= limit:
            return limit if max_tokens is None else prompt + max_tokens
        asked = f"max_tokens {max_tokens}" if max_tokens is not None else "at least one new token"
        raise RequestError(
            f"the prompt's {prompt} tokens and {asked} are {prompt + (max_tokens or 1)} together and can never fit:"
            f" the limit is {limit} (max_seq_len {self._model_limit}, KV cache of {self.pool.capacity} tokens)",
            field="prompt_token_ids" if prompt >= limit else "max_tokens",
        )

    def add(self, sequence: Sequence) -> None:
        """Puts it into the queue; its `max_len` came from `length_for`."""
        insort(self._waiting, sequence, key=_queue_key)

    def remove(self, sequence: Sequence, *, broken: bool = False) -> None:
        """Ends it at whatever stage it is, and frees its blocks; `broken`: what they hold may be NaN. Unknown ones are
        ignored."""
        for line in (self._decoding, self._prefilling):
            if _take_out(line, sequence):
                self._free(sequence, broken or line is self._prefilling)
                return
        at = bisect_left(self._waiting, _queue_key(sequence), key=_queue_key)
        if at < len(self._waiting) and self._waiting[at] is sequence:
            del self._waiting[at]

    def schedule(self, now: float = 0.0) -> Scheduled | None:
        """The next step, None where there is nothing to do. `now` is noted with the sequences that leave the queue."""
        decodes = self._ready_decodes()
        self._admit(self.max_batched_tokens - len(decodes), now)
        if not decodes and not self._prefilling:
            return None
        step = _Step(decodes)
        done = 0
        for sequence in self._prefilling:
            budget = self.max_batched_tokens - len(step.token_ids)
            if not budget:
                break
            step.add_chunk(sequence, min(budget, sequence.owed), self.pool)
            done += not sequence.owed
        if done:
            self._start_decoding()
        return step.result()

    def _ready_decodes(self) -> list[Sequence]:
        """All that decode, with a block for their next token. When one can't get any it is the least important of all."""
        size, ready = self.pool.block_size, 0
        while ready < len(self._decoding):
            sequence = self._decoding[ready]
            if len(sequence.blocks) * size < len(sequence.token_ids):
                if not self.pool.free and not self._preempt_below(sequence):
                    break
                sequence.blocks.append(self.pool.take())
                self.events.stored(sequence.blocks[-1:], 1)
            ready += 1
        return self._decoding[:ready]

    def _preempt_below(self, sequence: Sequence) -> bool:
        """Frees the blocks of the least important running sequence, unless that is this one."""
        lines = [line for line in (self._decoding, self._prefilling) if line]
        line = max(lines, key=_least_order)
        if line[-1] is sequence:
            return False
        victim = line.pop()
        self._free(victim, line is self._prefilling)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)
        return True

    def _admit(self, budget: int, now: float) -> None:
        """From the queue, strictly in order, as long as the step has tokens for them and the cache has blocks."""
        owed = sum([sequence.owed for sequence in self._prefilling])
        while self._waiting and self.running < self.max_num_seqs:
            head = self._waiting[-1]
            if owed >= budget and not (self._prefilling and head.order < self._prefilling[-1].order):
                return
            need = self.pool.blocks_for(len(head.token_ids))
            # Whoever runs may need one more block soon; without this margin a new sequence would be preempted at once.
            if need + self.running > self.pool.free and not (self.running == 0 and need <= self.pool.free):
                return
            self._waiting.pop()
            head.blocks = self.pool.take_many(need)
            self.events.stored(head.blocks, len(head.token_ids))
            head.admitted_at = now if head.admitted_at is None else head.admitted_at
            insort(self._prefilling, head, key=importance)
            owed += head.owed

    def _start_decoding(self) -> None:
        for sequence in self._prefilling:
            if not sequence.owed:
                insort(self._decoding, sequence, key=importance)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.owed]

    def _free(self, sequence: Sequence, suspect: bool) -> None:
        freed = self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        if freed:
            self.events.removed(freed)
        if suspect and sequence.computed:
            self.suspects += freed


class _Step:
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
        if not sequence.owed:
            self.sample_rows.append(len(self.logits_rows))
            self.logits_rows.append(first_row + length - 1)
            self.sampled.append(sequence)

    def _want_prompt_rows(self, sequence: Sequence, begin: int, end: int, first_row: int) -> None:
        """Row p tells of prompt token p + 1, so that the last prompt token's row is none of them."""
        last = sequence.prompt_len - 1
        known = sequence.prompt_row or 0
        wanted = range(max(begin, known), min(end, last))
        if wanted:
            self.prompt_rows.append(PromptRows(sequence, len(self.logits_rows), len(wanted), wanted.start))
            self.logits_rows.extend(range(first_row + wanted.start - begin, first_row + wanted.stop - begin))
        sequence.prompt_row = max(end, known) if end < last else None

    def result(self) -> Scheduled:
        batch = ScheduledBatch(
            token_ids=self.token_ids,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            logits_rows=self.logits_rows,
            num_decodes=self.num_decodes,
        )
        rows = self.sample_rows if self.prompt_rows else None
        return Scheduled(batch, self.sampled, rows, self.prompt_rows, len(self.token_ids) - self.num_decodes)


def _queue_key(sequence: Sequence) -> tuple[int, int, int]:
    priority, arrival, index = sequence.order
    return (-priority, -arrival, -index)


def _least_order(line: list[Sequence]) -> tuple[int, int, int]:
    return line[-1].order


def _take_out(line: list[Sequence], sequence: Sequence) -> bool:
    at = bisect_left(line, sequence.order, key=importance)
    if at < len(line) and line[at] is sequence:
        del line[at]
        return True
    return False
