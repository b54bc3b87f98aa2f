"""Which sequences take part in the next step, and with how many tokens. No torch, no clock.

Every running sequence that decodes gains its token in every step; what is left of the step's token budget goes to
prompts, the most important first, in chunks. Importance is (priority, arrival). Nothing overtakes the head of the queue,
so that a large request waits only until there is room. Where the cache is full, a sequence that needs a block takes it from the
least important one, which gives all of its own back and is computed anew later, its generated tokens included, as far as it is
not found in the cache then. Sequences of one prompt begin together, once that is computed.
"""

from bisect import bisect_left, insort

from tllm_core.engines.tp.block_tables import BlockTables
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.scheduled import Scheduled, StepBuilder
from tllm_core.engines.tp.sequence import Sequence, importance
from tllm_core.errors import RequestError


class Scheduler:
    """Continuous batching. A sequence waits, computes its prompt, decodes; `remove` ends it at any stage.

    After a step each sequence in `Scheduled.sampled` must have got its token appended, or be removed, and those whose row
    of logits was not finite, in `probes` and `prompt_rows` too, be removed as broken. `tables.suspects` must be cleared
    before the next step is run. reuse: blocks whose tokens were computed before are found and shared. window: how many tokens
    back any layer sees, None = all.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_seq_len: int,
        reuse: bool = True,
        window: int | None = None,
    ) -> None:
        if max_batched_tokens < max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs: each decodes a token per step")
        self.pool = pool
        self.max_num_seqs, self.max_batched_tokens = max_num_seqs, max_batched_tokens
        self.max_seq_len = min(max_seq_len, pool.capacity)
        self.preemptions = 0
        self.tables = BlockTables(pool, reuse=reuse, window=window)
        self._model_limit = max_seq_len
        # All three sorted; of `_waiting` the most important is the last, where a list is cheap to pop.
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        # Whose tokens of the last step were of a prompt: what these left in the cache is sound now.
        self._computed: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Also those that begin with another one, which has not come so far."""
        return sum([1 + len(s.siblings) for s in self._waiting]) + sum([len(s.siblings) for s in self._prefilling])

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

    def add(self, sequence: Sequence, *siblings: Sequence) -> None:
        """Puts it into the queue; its `max_len` came from `length_for`. `siblings` of the same prompt begin with it once
        that is computed, and end with it until then."""
        sequence.siblings = list(siblings)
        insort(self._waiting, sequence, key=_queue_key)

    def remove(self, sequence: Sequence, *, broken: bool = False) -> None:
        """Ends it at whatever stage it is, and frees its blocks; `broken`: what they hold may be NaN. Unknown ones are
        ignored."""
        sequence.siblings = []
        if _take_out(self._decoding, sequence) or _take_out(self._prefilling, sequence):
            self.tables.release(sequence, broken=broken)
            return
        at = bisect_left(self._waiting, _queue_key(sequence), key=_queue_key)
        if at < len(self._waiting) and self._waiting[at] is sequence:
            del self._waiting[at]

    def schedule(self, now: float = 0.0) -> Scheduled | None:
        """The next step, None where there is nothing to do. `now` is noted with the sequences that leave the queue."""
        self._settle()
        decodes = self._ready_decodes()
        self._admit(self.max_batched_tokens - len(decodes), now)
        if not decodes and not self._prefilling:
            return None
        step = StepBuilder(decodes)
        self._add_chunks(step)
        copies, self.tables.copies = self.tables.copies, []
        return step.result(copies)

    def forget_prefixes(self) -> int:
        """No request finds what was computed so far; those that run keep it. Returns how many blocks could be found."""
        return self.tables.forget([*self._decoding, *self._prefilling])

    def _settle(self) -> None:
        """What the last step computed of prompts can be found, by those that are about to compute the same too."""
        for sequence in self._computed:
            if sequence.blocks:
                self.tables.publish(sequence)
        self._computed = []
        for sequence in self._prefilling:
            self.tables.catch_up(sequence)

    def _ready_decodes(self) -> list[Sequence]:
        """All that decode, with a block for their next token. When one can't get any it is the least important of all."""
        size, ready = self.pool.block_size, 0
        while ready < len(self._decoding):
            sequence = self._decoding[ready]
            if len(sequence.blocks) * size < len(sequence.token_ids):
                self.tables.publish(sequence)
                if not self._grow(sequence):
                    break
            ready += 1
        return self._decoding[:ready]

    def _grow(self, sequence: Sequence) -> bool:
        while not self.tables.grow(sequence):
            if not self._preempt_below(sequence):
                return False
        return True

    def _preempt_below(self, sequence: Sequence) -> bool:
        """Has the least important running sequence give up its blocks, unless that is this one."""
        lines = [line for line in (self._decoding, self._prefilling) if line]
        victims = max(lines, key=_least_order)
        if victims[-1] is sequence:
            return False
        victim = victims.pop()
        self.tables.release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, victim, key=_queue_key)
        return True

    def _admit(self, budget: int, now: float) -> None:
        """From the queue, strictly in order, as long as the step has tokens for them and the cache has blocks."""
        owed = sum([sequence.owed for sequence in self._prefilling])
        while self._waiting:
            head = self._waiting[-1]
            if owed >= budget and not (self._prefilling and head.order < self._prefilling[-1].order):
                return
            before = self.running + sum([len(s.siblings) for s in self._prefilling if s.order < head.order])
            # Whoever runs may need one more block soon; without this margin a new sequence would be preempted at once.
            if before >= self.max_num_seqs or not self.tables.admit(head, before):
                return
            self._waiting.pop()
            head.admitted_at = now if head.admitted_at is None else head.admitted_at
            insort(self._prefilling, head, key=importance)
            owed += head.owed

    def _add_chunks(self, step: StepBuilder) -> None:
        for sequence in self._prefilling:
            budget = self.max_batched_tokens - len(step.token_ids)
            if not budget:
                break
            step.add_chunk(sequence, min(budget, sequence.owed), self.pool)
            self._computed.append(sequence)
            if not sequence.owed:
                self._begin(sequence, step)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.owed]

    def _begin(self, sequence: Sequence, step: StepBuilder) -> None:
        """Its prompt is computed with this step: it decodes from the next one on, and so do its siblings; those for which
        there is no room, or which somebody more important waits for, queue up."""
        running, siblings = self.running, sequence.siblings
        sequence.siblings = []
        insort(self._decoding, sequence, key=importance)
        for sibling in siblings:
            first = not self._waiting or sibling.order < self._waiting[-1].order
            if first and running < self.max_num_seqs and running < self.pool.free:
                self.tables.fork(sequence, sibling)
                step.add_sibling(sibling)
                insort(self._decoding, sibling, key=importance)
                running += 1
            else:
                insort(self._waiting, sibling, key=_queue_key)


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
