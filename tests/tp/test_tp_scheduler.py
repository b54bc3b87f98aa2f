"""The scheduler against a model of a cache: what a sequence reads is what it wrote, whatever happens around it."""

import zlib
from array import array
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tllm_core.contracts.messages import Logprob, SamplingParams, TokenIds
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.kv_hashes import root
from tllm_core.engines.tp.scheduled import Scheduled
from tllm_core.engines.tp.scheduler import Scheduler
from tllm_core.engines.tp.sequence import Sequence
from tllm_core.errors import RequestError

BLOCK = 4


def next_token(token_ids: array, index: int = 0) -> int:
    """The model: a token that depends on all before it, and on the sequence as a draw does."""
    return (zlib.crc32(token_ids.tobytes()) + index) % 1000


def continued(prompt: list[int], length: int, index: int = 0) -> list[int]:
    tokens = array("i", prompt)
    while len(tokens) < length:
        tokens.append(next_token(tokens, index))
    return tokens.tolist()


def score(prefix: list[int], top: int) -> list[Logprob]:
    """Prompt logprobs of the last of these tokens."""
    return [Logprob(prefix[-1], float(zlib.crc32(array("i", prefix).tobytes())), rank) for rank in range(top + 1)]


class Cache:
    """Block contents as the attention would see them; runs a step and checks it against the scheduler's promises.

    A row holds what its keys and values depend on: its token and, over several layers, all before it. A layer reads no more
    than the rows in its `window`, all of them where that is None.
    """

    def __init__(self, lines: Scheduler, window: int | None = None) -> None:
        self.lines, self.window = lines, window
        self.rows: list[list[tuple[int, ...] | None]] = [[None] * BLOCK for _ in range(lines.pool.num_blocks)]

    def run(self, step: Scheduled) -> list[int]:
        """The sampled tokens, computed from nothing but the batch and the cache."""
        batch, seen_at, start = step.batch, {}, 0
        self.copy(step)
        columns = list(zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True))
        written: list[int] = []
        for query, context, table in columns:
            assert len(table) == -(-(context + query) // BLOCK)
            self.check_unseen(table, context)
            written += table[context // BLOCK :]
            for offset in range(query):
                self.write(table, context + offset, batch.token_ids[start + offset])
            for offset in range(query):
                seen_at[start + offset] = (table, context + offset + 1)
            start += query
        assert start == len(batch.token_ids)
        assert len(written) == len(set(written)), "a block is written by two"
        for block in written:
            assert self.lines.pool.content(block) is None, "what others find is written"
        self.take_prompt_rows(step, seen_at)
        rows = range(len(batch.logits_rows)) if step.sample_rows is None else step.sample_rows
        return [
            next_token(self.read(*seen_at[batch.logits_rows[row]]), sequence.index)
            for row, sequence in zip(rows, step.sampled, strict=True)
        ]

    def copy(self, step: Scheduled) -> None:
        found = [list(self.rows[source]) for source, _ in step.batch.copies]
        targets = [target for _, target in step.batch.copies]
        assert len(set(targets)) == len(targets)
        for target, rows in zip(targets, found, strict=True):
            self.rows[target] = rows

    def write(self, table: list[int], at: int, token: int) -> None:
        before = self.rows[table[(at - 1) // BLOCK]][(at - 1) % BLOCK] if at else ()
        assert before is not None
        self.rows[table[at // BLOCK]][at % BLOCK] = (*before, token)

    def read(self, table: list[int], length: int) -> array:
        last = self.rows[table[(length - 1) // BLOCK]][(length - 1) % BLOCK]
        assert last is not None
        assert len(last) == length
        for at in range(self.first_seen(length - 1), length):
            row = self.rows[table[at // BLOCK]][at % BLOCK]
            assert row is not None, "a row is read that was never written"
            assert row == last[: at + 1], "a row was computed behind other tokens"
        return array("i", last)

    def first_seen(self, position: int) -> int:
        """The first position that a token at this one sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def check_unseen(self, table: list[int], context: int) -> None:
        """A kernel may read what it masks: there stands a block that the sequence reads anyway, or one of its old ones."""
        seen = self.first_seen(context) // BLOCK
        assert all(self.lines.pool.references(block) for block in table)
        assert len(set(table[seen:])) == len(table) - seen

    def take_prompt_rows(self, step: Scheduled, seen_at: dict[int, tuple[list[int], int]]) -> None:
        for sequence, first, length, position in step.prompt_rows:
            top = sequence.sampling.prompt_logprobs
            assert sequence.prompt_logprobs is not None
            assert len(sequence.prompt_logprobs) == position + 1
            for place, row in enumerate(step.batch.logits_rows[first : first + length]):
                tokens = self.read(*seen_at[row]).tolist()
                assert len(tokens) == position + place + 1
                sequence.prompt_logprobs.append(score([*tokens, sequence.token_ids[len(tokens)]], top))
        for sequence, row in step.probes:
            tokens = self.read(*seen_at[step.batch.logits_rows[row]])
            assert tokens == sequence.token_ids[: sequence.computed]


def make(
    prompt: int | list[int], max_len: int, *, arrival: int = 0, priority: int = 0, index: int = 0, salt=None, **sampling
) -> Sequence:
    tokens = [1000 * arrival + at for at in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(
        TokenIds.of(tokens),
        SamplingParams(**sampling),
        order=(priority, arrival, index),
        max_len=max_len,
        request_id=arrival,
        chain_root=root(salt),
    )


def scheduler(
    blocks: int = 100,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 16,
    max_seq_len: int = 200,
    reuse: bool = True,
    window: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, BLOCK),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_seq_len=max_seq_len,
        reuse=reuse,
        window=window,
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


BASES = [[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7], list(range(30)), [*range(9), *range(21)]]
"""Prompts are beginnings of these and something behind them, so that prefixes are shared."""


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, forks, steps, aborts, failures and new weights in any order, with prefixes in common."""

    @initialize(
        blocks=st.integers(3, 14),
        seqs=st.integers(1, 6),
        tokens=st.integers(0, 10),
        reuse=st.booleans(),
        window=st.one_of(st.none(), st.integers(2, 13)),
    )
    def begin(self, blocks: int, seqs: int, tokens: int, reuse: bool, window: int | None) -> None:
        self.lines = scheduler(blocks, seqs, seqs + tokens, max_seq_len=40, reuse=reuse, window=window)
        self.cache = Cache(self.lines, window)
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.prompts: dict[Sequence, list[int]] = {}
        self.arrivals = 0
        self.decoding: set[Sequence] = set()

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(0, 30),
        behind=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        more=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.one_of(st.none(), st.integers(0, 2)),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def arrive(self, base, length, behind, more, priority, prompt_logprobs, n, salt) -> None:
        prompt = [*base[:length], *behind]
        limit = self.lines.max_seq_len
        if len(prompt) + (more or 1) > limit:
            with pytest.raises(RequestError, match=f"the limit is {limit}"):
                self.lines.length_for(len(prompt), more)
            return
        self.arrivals += 1
        sequences = [
            make(
                prompt,
                self.lines.length_for(len(prompt), more),
                arrival=self.arrivals,
                priority=priority,
                index=index,
                salt=salt,
                prompt_logprobs=prompt_logprobs,
            )
            for index in range(n)
        ]
        self.lines.add(*sequences)
        self.live += sequences
        self.prompts.update((sequence, prompt) for sequence in sequences)

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick) -> None:
        self.drop(pick.choice(self.live))

    def drop(self, one: Sequence, broken: bool = False) -> None:
        """The whole request of this sequence."""
        for sequence in [s for s in self.live if s.request_id == one.request_id]:
            self.live.remove(sequence)
            self.lines.remove(sequence, broken=broken)
            assert not sequence.blocks
            assert sequence.source is None
            self.lines.remove(sequence)

    @rule()
    def new_weights(self) -> None:
        self.lines.forget_prefixes()
        assert self.lines.pool.published == 0

    @rule(fail=st.booleans())
    def step(self, fail: bool = False) -> None:
        decoding = [(s, s.preemptions) for s in self.decoding if s in self.live and s.blocks]
        queued = list(self.lines._waiting)
        step = self.lines.schedule()
        if step is None:
            assert not self.live
            return
        self.check_shape(step)
        self.check_decodes(step, decoding)
        self.check_queue(queued, step)
        self.clear_suspects()
        tokens = self.cache.run(step)
        for row, (sequence, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if sequence not in self.live:
                continue
            if fail and row == 0:
                self.drop(sequence, broken=True)
                continue
            sequence.token_ids.append(token)
            if len(sequence.token_ids) == sequence.prompt_len + 1:
                self.check_scores(sequence)
            if len(sequence.token_ids) == sequence.max_len:
                self.ended.append(sequence)
                self.live.remove(sequence)
                self.lines.remove(sequence)

    def clear_suspects(self) -> None:
        suspects, self.lines.tables.suspects = self.lines.tables.suspects, []
        for block in suspects:
            assert self.lines.pool.content(block) is None
            self.cache.rows[block] = [None] * BLOCK

    def check_scores(self, sequence: Sequence) -> None:
        """Prompt logprobs are those of its own tokens, wherever they came from."""
        top = sequence.sampling.prompt_logprobs
        if top is None or sequence.index:
            assert sequence.prompt_logprobs is None
            return
        tokens = sequence.token_ids[: sequence.prompt_len].tolist()
        expected = [score(tokens[: at + 1], top) for at in range(1, len(tokens))]
        assert sequence.prompt_logprobs == [(), *expected]

    def check_shape(self, step: Scheduled) -> None:
        batch, lines = step.batch, self.lines
        assert 0 < len(batch.token_ids) <= lines.max_batched_tokens
        assert len(batch.query_lens) <= lines.max_num_seqs
        assert lines.running <= lines.max_num_seqs
        assert lines.running + lines.waiting == len(self.live)
        assert min(batch.query_lens) >= 1
        assert batch.query_lens[: batch.num_decodes] == [1] * batch.num_decodes
        assert batch.logits_rows == sorted(set(batch.logits_rows))
        self.check_owners()

    def check_owners(self) -> None:
        """Every reference is a sequence's; who shares a block has the same tokens in it, under the same salt."""
        pool, owners = self.lines.pool, Counter(block for s in self.live for block in owned(s))
        assert [pool.references(block) for block in range(pool.num_blocks)] == [
            owners[block] for block in range(pool.num_blocks)
        ]
        assert pool.used == len(owners)
        holders: dict[int, Sequence] = {}
        for sequence in self.live:
            for at, block in list(enumerate(sequence.blocks))[sequence.unseen :]:
                other = holders.setdefault(block, sequence)
                if other is not sequence and at < len(sequence.token_ids) // BLOCK:
                    assert other.chain_root == sequence.chain_root
                    end = (at + 1) * BLOCK
                    assert other.token_ids[:end][: len(sequence.token_ids)] == sequence.token_ids[:end]

    def check_decodes(self, step: Scheduled, decoding: list[tuple[Sequence, int]]) -> None:
        """All gain a token, or gave up their blocks, or are the least important while the cache is full."""
        gaining = step.sampled[: step.batch.num_decodes]
        stalled = [s for s, preemptions in decoding if s not in gaining and s.preemptions == preemptions]
        self.decoding = {*stalled, *step.sampled}
        for sequence in stalled:
            assert not self.lines.pool.free
            assert sequence.order == max(s.order for s in self.live if s.blocks)

    def check_queue(self, queued: list[Sequence], step: Scheduled) -> None:
        admitted = [s.order for s in queued if s.blocks]
        still = [s.order for s in queued if s in self.live and not s.blocks]
        assert not admitted or not still or max(admitted) < min(still)
        begun = [s.order for s in step.sampled if s.index and s not in queued and s.generated == 0]
        assert not begun or not still or max(begun) < min(still)

    def teardown(self) -> None:
        """Everything that is left comes to its end in bounded time, exactly, and nothing leaks."""
        if not hasattr(self, "lines"):
            return
        left = 2 * sum(s.max_len for s in self.live)
        while self.live:
            assert left > 0
            left -= 1
            self.step()
        for sequence in self.ended:
            expected = continued(self.prompts[sequence], sequence.max_len, sequence.index)
            assert sequence.token_ids.tolist() == expected
        assert self.lines.schedule() is None
        assert (self.lines.pool.used, self.lines.running, self.lines.waiting) == (0, 0, 0)
        assert self.lines.tables.copies == []
        assert self.lines.tables.hits <= self.lines.tables.queries


def owned(sequence: Sequence) -> list[int]:
    blocks = sequence.blocks[sequence.unseen :]
    return blocks if sequence.source is None else [*blocks, sequence.source]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_running_sequences_decode_beside_the_chunks_of_a_long_prompt() -> None:
    lines = scheduler(max_batched_tokens=8)
    cache = Cache(lines)
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
    lines = scheduler(max_num_seqs=1)
    cache = Cache(lines)
    sequences = [make(4, 6, arrival=at, priority=p) for at, p in enumerate([5, 0, -3, 0])]
    for sequence in sequences:
        lines.add(sequence)
    order = []
    while step := advance(lines, cache):
        order += [s.request_id for s in step.sampled if s.generated == 1]
    assert order == [2, 1, 3, 0]


def test_an_important_prompt_goes_before_the_rest_of_a_long_unimportant_one() -> None:
    lines = scheduler(max_batched_tokens=8)
    cache = Cache(lines)
    long, short = make(60, 80, arrival=1, priority=1), make(5, 20, arrival=2)
    lines.add(long)
    advance(lines, cache)
    lines.add(short)
    step = advance(lines, cache)
    assert step is not None
    assert step.batch.query_lens == [3, 5] or step.batch.query_lens == [5, 3]
    assert short.generated == 1


def test_a_small_request_does_not_overtake_a_large_one_at_the_head() -> None:
    lines = scheduler(blocks=10, max_batched_tokens=64)
    cache = Cache(lines)
    lines.add(make(20, 24, arrival=1))
    advance(lines, cache)
    large, small = make(24, 26, arrival=2), make(2, 4, arrival=3)
    lines.add(large)
    lines.add(small)
    while not large.blocks:
        assert not small.blocks
        assert advance(lines, cache)


def test_a_full_cache_preempts_the_least_important_and_newest_and_it_resumes_exactly() -> None:
    lines = scheduler(blocks=8, max_batched_tokens=64)
    cache = Cache(lines)
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
    lines = scheduler(blocks=6, max_batched_tokens=64)
    cache = Cache(lines)
    old, new = make(8, 24, arrival=1, priority=1), make(8, 24, arrival=2, priority=0)
    lines.add(old)
    lines.add(new)
    while lines.pending:
        advance(lines, cache)
    assert (old.preemptions > 0, new.preemptions) == (True, 0)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("window", [2, 4, 5, 11])
def test_a_long_generation_keeps_no_more_than_its_window(window: int, reuse: bool) -> None:
    lines = scheduler(blocks=40, window=window, reuse=reuse)
    cache = Cache(lines, window)
    sequence = make(10, 150, arrival=1)
    lines.add(sequence)
    most = -(-(window - 1) // BLOCK) + 1
    while advance(lines, cache) is not None:
        if sequence.generated > BLOCK:
            assert lines.pool.used <= most + 1
    assert sequence.token_ids.tolist() == continued(sequence.token_ids[:10].tolist(), 150)
    assert lines.pool.used == 0


def test_tokens_that_see_but_themselves_need_one_block() -> None:
    lines = scheduler(blocks=40, window=1)
    sequence = make(10, 150, arrival=1)
    lines.add(sequence)
    while len(sequence.token_ids) < sequence.max_len:
        step = lines.schedule()
        assert step is not None
        assert all(lines.pool.references(block) for table in step.batch.block_tables for block in table)
        assert lines.pool.used <= (2 if sequence.generated > BLOCK else 3)
        sequence.token_ids.append(7)
    lines.remove(sequence)
    assert lines.pool.used == 0


def test_several_generations_fit_where_only_their_windows_do() -> None:
    """Twelve blocks would hold one of them whole."""
    lines = scheduler(blocks=12, window=8, max_num_seqs=3)
    cache = Cache(lines, 8)
    sequences = [make([at] * 4, 44, arrival=at) for at in range(3)]
    for sequence in sequences:
        lines.add(sequence)
    while advance(lines, cache) is not None:
        pass
    assert lines.preemptions == 0
    assert [s.token_ids.tolist() for s in sequences] == [continued([at] * 4, 44) for at in range(3)]


def test_behind_a_window_only_what_it_shows_must_be_found() -> None:
    """The beginning of an earlier sequence was given up for others; its end still holds all that a longer one needs."""
    lines = scheduler(blocks=14, window=8)
    cache = Cache(lines, 8)
    first = make(4, 44, arrival=1)
    lines.add(first)
    while advance(lines, cache) is not None:
        pass
    text = first.token_ids.tolist()
    taken = lines.pool.take_many(8)
    assert lines.pool.find(first.chain[0]) is None
    second = make([*text, 5, 6], 50, arrival=2)
    lines.add(second)
    lines.schedule()
    assert second.cached_tokens == 40, "of 43 tokens that were computed ten blocks are full"
    assert (second.unseen, lines.pool.used) == (8, 8 + 4)
    lines.remove(second)
    lines.pool.give_back(taken)
    assert lines.pool.used == 0


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
    lines = scheduler(blocks=10, max_num_seqs=2, max_batched_tokens=2)
    cache = Cache(lines)
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
            assert tokens == [2000 + at for at in range(rows.position, rows.position + rows.length)]
            positions += [token - 2000 for token in tokens]
    assert watched.preemptions
    assert positions == list(range(26))


def test_the_step_budget_must_hold_a_token_for_every_running_sequence() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens must be at least max_num_seqs"):
        scheduler(max_num_seqs=9, max_batched_tokens=8)
