"""The scheduler against a model of a cache: what a sequence reads is what it wrote, whatever happens around it."""

import zlib
from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tllm_core.contracts.messages import SamplingParams, TokenIds
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.scheduler import Scheduled, Scheduler
from tllm_core.engines.tp.sequence import Sequence
from tllm_core.errors import RequestError

BLOCK = 4


def next_token(token_ids: array) -> int:
    """The model: a token that depends on all before it."""
    return zlib.crc32(token_ids.tobytes()) % 1000


def continued(prompt: list[int], length: int) -> list[int]:
    tokens = array("i", prompt)
    while len(tokens) < length:
        tokens.append(next_token(tokens))
    return tokens.tolist()


class Cache:
    """Block contents as the attention would see them; runs a step and checks it against the scheduler's promises."""

    def __init__(self, blocks: int) -> None:
        self.rows: list[list[int | None]] = [[None] * BLOCK for _ in range(blocks)]

    def run(self, step: Scheduled) -> list[int]:
        """The sampled tokens, computed from nothing but the batch and the cache."""
        batch, results, start = step.batch, {}, 0
        columns = zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True)
        for query, context, table in columns:
            assert len(table) == -(-(context + query) // BLOCK)
            for offset in range(query):
                at = context + offset
                self.rows[table[at // BLOCK]][at % BLOCK] = batch.token_ids[start + offset]
            seen = [self.rows[table[at // BLOCK]][at % BLOCK] for at in range(context + query)]
            assert None not in seen
            results[start + query - 1] = next_token(array("i", seen))
            start += query
        assert start == len(batch.token_ids)
        rows = range(len(batch.logits_rows)) if step.sample_rows is None else step.sample_rows
        return [results[batch.logits_rows[row]] for row in rows]


def make(prompt: int | list[int], max_len: int, *, arrival: int = 0, priority: int = 0, **sampling) -> Sequence:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    order = (priority, arrival, 0)
    return Sequence(TokenIds.of(tokens), SamplingParams(**sampling), order=order, max_len=max_len, request_id=arrival)


def scheduler(
    blocks: int = 100, max_num_seqs: int = 8, max_batched_tokens: int = 16, max_seq_len: int = 200
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, BLOCK),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_seq_len=max_seq_len,
    )


def advance(lines: Scheduler, cache: Cache) -> Scheduled | None:
    """One whole step: schedule, execute, append, end what is full."""
    step = lines.schedule()
    if step is not None:
        for sequence, token in zip(step.sampled, cache.run(step), strict=True):
            sequence.token_ids.append(token)
            if len(sequence.token_ids) >= sequence.max_len:
                lines.remove(sequence)
    return step


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts and failures in any order."""

    @initialize(blocks=st.integers(3, 14), seqs=st.integers(1, 6), tokens=st.integers(0, 10))
    def begin(self, blocks: int, seqs: int, tokens: int) -> None:
        self.lines = scheduler(blocks, seqs, seqs + tokens, max_seq_len=40)
        self.cache = Cache(blocks)
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.prompts: dict[Sequence, list[int]] = {}
        self.arrivals = 0
        self.decoding: set[Sequence] = set()

    @rule(
        prompt=st.lists(st.integers(0, 999), min_size=1, max_size=30),
        more=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.booleans(),
    )
    def arrive(self, prompt: list[int], more: int | None, priority: int, prompt_logprobs: bool) -> None:
        limit = self.lines.max_seq_len
        if len(prompt) + (more or 1) > limit:
            with pytest.raises(RequestError, match=f"the limit is {limit}"):
                self.lines.length_for(len(prompt), more)
            return
        self.arrivals += 1
        sequence = make(
            prompt,
            self.lines.length_for(len(prompt), more),
            arrival=self.arrivals,
            priority=priority,
            prompt_logprobs=1 if prompt_logprobs else None,
        )
        self.lines.add(sequence)
        self.live.append(sequence)
        self.prompts[sequence] = prompt

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick) -> None:
        sequence = pick.choice(self.live)
        self.live.remove(sequence)
        self.lines.remove(sequence)
        assert not sequence.blocks
        self.lines.remove(sequence)

    @rule(fail=st.booleans())
    def step(self, fail: bool = False) -> None:
        decoding = [(s, s.preemptions) for s in self.decoding if s in self.live and s.blocks]
        queued = [s for s in self.live if not s.blocks]
        step = self.lines.schedule()
        if step is None:
            assert not self.live
            return
        self.check_shape(step)
        self.check_decodes(step, decoding)
        self.check_queue(queued)
        tokens = self.cache.run(step)
        for row, (sequence, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if fail and row == 0:
                self.end(sequence)
                continue
            sequence.token_ids.append(token)
            if len(sequence.token_ids) == sequence.max_len:
                self.ended.append(sequence)
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.lines.remove(sequence)
        self.live.remove(sequence)

    def check_shape(self, step: Scheduled) -> None:
        batch, lines = step.batch, self.lines
        assert 0 < len(batch.token_ids) <= lines.max_batched_tokens
        assert len(batch.query_lens) <= lines.max_num_seqs
        assert lines.running <= lines.max_num_seqs
        assert min(batch.query_lens) >= 1
        assert batch.query_lens[: batch.num_decodes] == [1] * batch.num_decodes
        assert batch.logits_rows == sorted(set(batch.logits_rows))
        owned = [block for s in self.live for block in s.blocks]
        assert len(owned) == len(set(owned)) == lines.pool.used
        assert all(lines.pool.references(block) == 1 for block in owned)

    def check_decodes(self, step: Scheduled, decoding: list[tuple[Sequence, int]]) -> None:
        """All gain a token, or gave up their blocks, or are the least important while the cache is full."""
        gaining = step.sampled[: step.batch.num_decodes]
        stalled = [s for s, preemptions in decoding if s not in gaining and s.preemptions == preemptions]
        self.decoding = {*stalled, *step.sampled}
        for sequence in stalled:
            assert not self.lines.pool.free
            assert sequence.order == max(s.order for s in self.live if s.blocks)

    def check_queue(self, queued: list[Sequence]) -> None:
        admitted = [s.order for s in queued if s.blocks]
        still = [s.order for s in self.live if not s.blocks]
        assert not admitted or not still or max(admitted) < min(still)

    def teardown(self) -> None:
        """Everything that is left comes to its end in bounded time, exactly, and nothing leaks."""
        if not hasattr(self, "lines"):
            return
        left = sum(s.max_len for s in self.live)
        while self.live:
            assert left > 0
            left -= 1
            self.step()
        for sequence in self.ended:
            assert sequence.token_ids.tolist() == continued(self.prompts[sequence], sequence.max_len)
        assert self.lines.schedule() is None
        assert (self.lines.pool.used, self.lines.running, self.lines.waiting) == (0, 0, 0)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_running_sequences_decode_beside_the_chunks_of_a_long_prompt() -> None:
    lines, cache = scheduler(max_batched_tokens=8), Cache(100)
    first = make(3, 100, arrival=1)
    lines.add(first)
    advance(lines, cache)
    lines.add(make(30, 40, arrival=2))
    for _ in range(4):
        before = first.generated
        step = advance(lines, cache)
        assert step is not None
        assert step.batch.query_lens == [1, 7]
        assert first.generated == before + 1


def test_the_budget_is_shared_by_several_prompts_in_order_of_arrival() -> None:
    lines = scheduler(max_batched_tokens=16)
    for arrival in range(3):
        lines.add(make(10, 20, arrival=arrival))
    step = lines.schedule()
    assert step is not None
    assert step.batch.query_lens == [10, 6]
    assert [s.request_id for s in step.sampled] == [0]


def test_lower_priority_numbers_run_first_then_earlier_arrivals() -> None:
    lines, cache = scheduler(max_num_seqs=1), Cache(100)
    sequences = [make(4, 6, arrival=at, priority=p) for at, p in enumerate([5, 0, -3, 0])]
    for sequence in sequences:
        lines.add(sequence)
    order = []
    while step := advance(lines, cache):
        order += [s.request_id for s in step.sampled if s.generated == 1]
    assert order == [2, 1, 3, 0]


def test_an_important_prompt_goes_before_the_rest_of_a_long_unimportant_one() -> None:
    lines, cache = scheduler(max_batched_tokens=8), Cache(100)
    long, short = make(60, 80, arrival=1, priority=1), make(5, 20, arrival=2)
    lines.add(long)
    advance(lines, cache)
    lines.add(short)
    step = advance(lines, cache)
    assert step is not None
    assert step.batch.query_lens == [3, 5] or step.batch.query_lens == [5, 3]
    assert short.generated == 1


def test_a_small_request_does_not_overtake_a_large_one_at_the_head() -> None:
    lines, cache = scheduler(blocks=10, max_batched_tokens=64), Cache(10)
    lines.add(make(20, 24, arrival=1))
    advance(lines, cache)
    large, small = make(24, 26, arrival=2), make(2, 4, arrival=3)
    lines.add(large)
    lines.add(small)
    while not large.blocks:
        assert not small.blocks
        assert advance(lines, cache)


def test_a_full_cache_preempts_the_least_important_and_newest_and_it_resumes_exactly() -> None:
    lines, cache = scheduler(blocks=8, max_batched_tokens=64), Cache(8)
    sequences = [make([at] * 6, 24, arrival=at) for at in range(3)]
    for sequence in sequences:
        lines.add(sequence)
    while lines.pending:
        advance(lines, cache)
    assert [s.preemptions > 0 for s in sequences] == [False, True, True]
    assert lines.preemptions == sum(s.preemptions for s in sequences)
    for at, sequence in enumerate(sequences):
        assert sequence.token_ids.tolist() == continued([at] * 6, 24)


def test_priority_decides_who_is_preempted_before_arrival_does() -> None:
    lines, cache = scheduler(blocks=6, max_batched_tokens=64), Cache(6)
    old, new = make(8, 24, arrival=1, priority=1), make(8, 24, arrival=2, priority=0)
    lines.add(old)
    lines.add(new)
    while lines.pending:
        advance(lines, cache)
    assert (old.preemptions > 0, new.preemptions) == (True, 0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "length"), [(10, None, 40), (10, 30, 40), (10, 5, 15), (39, None, 40), (1, 1, 2)]
)
def test_max_tokens_is_taken_or_what_fits(prompt: int, max_tokens: int | None, length: int) -> None:
    assert scheduler(blocks=10, max_seq_len=90).length_for(prompt, max_tokens) == length


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [(40, None, "prompt_token_ids"), (10, 31, "max_tokens"), (5000, 1, "prompt_token_ids")],
)
def test_what_can_never_fit_is_refused_with_all_numbers(prompt: int, max_tokens: int | None, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        scheduler(blocks=10, max_seq_len=90).length_for(prompt, max_tokens)
    assert caught.value.field == field
    for number in (prompt, max_tokens or "at least one", 90, 40):
        assert str(number) in str(caught.value)


def test_prompt_rows_come_once_each_in_order_also_over_chunks_and_preemption() -> None:
    lines, cache = scheduler(blocks=10, max_num_seqs=2, max_batched_tokens=2), Cache(10)
    first, watched = make(4, 24, arrival=1), make(27, 30, arrival=2, prompt_logprobs=0)
    lines.add(first)
    lines.add(watched)
    positions: list[int] = []
    while (step := advance(lines, cache)) is not None:
        for rows in step.prompt_rows:
            assert rows.sequence is watched
            tokens = [
                step.batch.token_ids[row] for row in step.batch.logits_rows[rows.first : rows.first + rows.length]
            ]
            assert tokens == list(range(rows.position, rows.position + rows.length))
            positions += tokens
    assert watched.preemptions
    assert positions == list(range(26))


def test_the_step_budget_must_hold_a_token_for_every_running_sequence() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens must be at least max_num_seqs"):
        scheduler(max_num_seqs=9, max_batched_tokens=8)
