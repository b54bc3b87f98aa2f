"""What requests have in common is computed once, and nobody's tokens change by it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tp.test_tp_controls import altered, call, events
from tests.tp.test_tp_engine import MARGIN, Bench, Received, Reference, assert_greedy, poison, prompts
from tllm_core.contracts.messages import RequestMetrics


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


def ask(bench: Bench, prompt: list[int], **options) -> Received:
    """One request alone, greedy and of 12 tokens unless `options` say otherwise."""
    return bench.alone(prompt, **{"max_tokens": 12, "ignore_eos": True, **options})


def metrics(got: Received) -> RequestMetrics:
    assert got.metrics is not None
    return got.metrics


def prefill_tokens(bench: Bench) -> int:
    return bench.engine.stats().extra["prefill_tokens"]


# --------------------------------------------------------------------------------------------------------- hits


@pytest.mark.parametrize(("length", "found"), [(40, 32), (48, 47), (33, 32), (15, 0), (16, 15), (17, 16), (1, 0)])
def test_a_prompt_that_was_asked_before_is_found_but_for_its_last_token(
    model_dir: Path, reference: Reference, length: int, found: int
) -> None:
    bench, (prompt,) = Bench(model_dir), prompts(length)
    first = ask(bench, prompt)
    before = prefill_tokens(bench)
    second = ask(bench, prompt)
    assert (metrics(first).cached_tokens, metrics(second).cached_tokens) == (0, found)
    assert prefill_tokens(bench) - before == length - found
    expected = reference.greedy(prompt, 12)
    assert_greedy(first.token_ids, expected)
    assert_greedy(second.token_ids, expected)
    stats = bench.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (2 * length, found)
    assert (stats.extra["cache_queries"], stats.extra["cache_hits"]) == (2 * length, found)


def test_a_conversation_goes_on_from_what_was_generated(model_dir: Path, reference: Reference) -> None:
    bench, (prompt, more) = Bench(model_dir), prompts(20, 15, seed=3)
    answer = ask(bench, prompt, max_tokens=30).token_ids
    second = ask(bench, [*prompt, *answer, *more])
    assert metrics(second).cached_tokens == 48
    assert_greedy(second.token_ids, reference.greedy([*prompt, *answer, *more], 12))


def test_prompts_that_part_within_a_block_share_what_is_before_it(model_dir: Path, reference: Reference) -> None:
    bench, (common, one, two) = Bench(model_dir), prompts(40, 30, 30, seed=4)
    ask(bench, common + one)
    second = ask(bench, common + two)
    assert metrics(second).cached_tokens == 32
    assert_greedy(second.token_ids, reference.greedy(common + two, 12))


def test_those_that_run_at_once_find_each_others_prompts_and_give_up_what_is_there_twice(
    model_dir: Path, reference: Reference
) -> None:
    bench, (prompt,) = Bench(model_dir, max_batched_tokens=40, max_num_seqs=8), prompts(72)
    ids = [bench.submit(prompt, max_tokens=40, ignore_eos=True) for _ in range(4)]
    for _ in range(8):
        bench.step()
    # 72 tokens are 4 full blocks, which all share, and one of each's own.
    assert bench.engine.stats().kv_blocks_used == 4 + 4
    bench.drain()
    assert prefill_tokens(bench) < 2 * 72
    expected = reference.greedy(prompt, 40)
    for request_id in ids:
        assert_greedy(bench.tokens(request_id), expected)


def test_a_long_prompt_is_found_as_far_as_it_had_come_when_it_was_aborted(model_dir: Path) -> None:
    bench, (prompt,) = Bench(model_dir, max_batched_tokens=32, max_num_seqs=8), prompts(200)
    request_id = bench.submit(prompt, max_tokens=4)
    for _ in range(3):
        bench.step()
    bench.abort(request_id)
    assert metrics(ask(bench, prompt)).cached_tokens == 96


def test_what_was_preempted_is_found_again(model_dir: Path) -> None:
    bench = Bench(model_dir, num_blocks=12)
    first, second = prompts(40, 80, seed=9)
    kept = bench.submit(first, max_tokens=100, ignore_eos=True)
    victim = bench.submit(second, max_tokens=60, ignore_eos=True)
    bench.drain()
    stats = bench.engine.stats()
    assert stats.preemptions > 0
    assert bench.received[kept][0].metrics is not None
    assert metrics(bench.received[victim][0]).cached_tokens == 0, "it is not what others had computed"
    assert stats.extra["cache_hits"] > 0
    assert stats.cached_tokens == 0


def test_other_salts_find_nothing(model_dir: Path) -> None:
    bench, (prompt,) = Bench(model_dir), prompts(40)
    salts = [None, "", "a", "b", "\ud800"]
    assert [metrics(ask(bench, prompt, cache_salt=salt)).cached_tokens for salt in salts] == [0] * 5
    assert [metrics(ask(bench, prompt, cache_salt=salt)).cached_tokens for salt in salts] == [32] * 5


def test_it_can_be_switched_off(model_dir: Path, reference: Reference) -> None:
    bench, (prompt,) = Bench(model_dir, enable_prefix_cache=False), prompts(40)
    for _ in range(2):
        got = ask(bench, prompt)
        assert metrics(got).cached_tokens == 0
        assert_greedy(got.token_ids, reference.greedy(prompt, 12))
    stats = bench.engine.stats()
    assert (stats.extra["cache_queries"], stats.extra["kv_blocks_cached"]) == (0, 0)
    assert events(bench).events == ()


def test_what_is_not_needed_makes_room_and_the_least_used_goes_first(model_dir: Path) -> None:
    bench = Bench(model_dir, num_blocks=12)
    old, kept, new = prompts(64, 48, 64, seed=6)
    ask(bench, old, max_tokens=1)
    ask(bench, kept, max_tokens=1)
    assert metrics(ask(bench, kept, max_tokens=1)).cached_tokens == 47
    ask(bench, new, max_tokens=32)
    assert metrics(ask(bench, kept, max_tokens=1)).cached_tokens == 47
    # Of the oldest the end went first.
    assert 0 < metrics(ask(bench, old, max_tokens=1)).cached_tokens < 63


# ------------------------------------------------------------------------------------------------------ control


def test_a_reset_leaves_nothing_to_be_found_and_running_requests_alone(model_dir: Path, reference: Reference) -> None:
    bench, (prompt, other) = Bench(model_dir), prompts(40, 50, seed=2)
    ask(bench, prompt)
    running = bench.submit(other, max_tokens=12, ignore_eos=True)
    for _ in range(3):
        bench.step()
    assert call(bench, "reset_prefix_cache") == 3 + 3
    assert call(bench, "reset_prefix_cache") == 0
    bench.drain()
    assert_greedy(bench.tokens(running), reference.greedy(other, 12))
    assert metrics(ask(bench, other)).cached_tokens == 0
    assert metrics(ask(bench, prompt)).cached_tokens == 0
    assert metrics(ask(bench, prompt)).cached_tokens == 32


@pytest.mark.parametrize("how", ["update_weights", "while_running", "sleep", "reset_caches"])
def test_what_old_weights_or_freed_memory_held_is_never_found(model_dir: Path, tmp_path: Path, how: str) -> None:
    (prompt,) = prompts(40)
    bench = Bench(model_dir)
    before = ask(bench, prompt).token_ids
    running = bench.submit(prompt, max_tokens=12, ignore_eos=True) if how == "while_running" else None
    if running:
        bench.step()
    weights = model_dir
    if how in ("update_weights", "while_running"):
        weights = altered(model_dir, tmp_path / "new", lambda loaded: loaded["model.norm.weight"].mul_(-1))
        call(bench, "update_weights", str(weights), *([True] if running else []))
    elif how == "sleep":
        call(bench, "sleep")
        call(bench, "wakeup")
    else:
        call(bench, "reset_caches")
    bench.drain()
    got = ask(bench, prompt)
    assert metrics(got).cached_tokens == 0
    assert got.token_ids == ask(Bench(weights), prompt).token_ids
    assert (got.token_ids == before) == (weights is model_dir)


def test_what_is_broken_is_never_found(model_dir: Path, reference: Reference) -> None:
    bench, (prompt,) = Bench(model_dir), prompts(40)
    execute = bench.engine._runner.execute
    poison(bench, lambda length, tokens: length == 70)
    victim = bench.submit(prompt, max_tokens=60, ignore_eos=True)
    bench.drain()
    assert list(bench.errors) == [victim]
    bench.engine._runner.execute = execute
    bench.errors.clear()
    # 70 tokens were computed; the block of the last six was never seen to be sound.
    got = ask(bench, prompt + bench.tokens(victim), max_tokens=20)
    assert metrics(got).cached_tokens == 64
    assert_greedy(got.token_ids, reference.greedy(prompt + bench.tokens(victim), 20))


# -------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("length", [40, 48, 7])
@pytest.mark.parametrize("reuse", [True, False])
def test_the_prompt_of_n_sequences_is_computed_once(
    model_dir: Path, reference: Reference, length: int, reuse: bool
) -> None:
    bench, (prompt,) = Bench(model_dir, enable_prefix_cache=reuse, block_size=16), prompts(length)
    greedy = bench.submit(prompt, max_tokens=30, ignore_eos=True, n=3)
    bench.step()
    assert [len(row.token_ids) for row in bench.received[greedy]] == [1, 1, 1], "all begin in the same step"
    # What is full is shared; what is not was copied in the step after.
    bench.step()
    full = length // 16
    assert bench.engine.stats().kv_blocks_used == full + 3
    bench.drain()
    assert prefill_tokens(bench) == length
    for index in range(3):
        assert_greedy(bench.tokens(greedy, index), reference.greedy(prompt, 30))


def test_drawn_siblings_are_those_that_separate_requests_would_get(model_dir: Path) -> None:
    (prompt,) = prompts(21)
    options = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 9}
    bench = Bench(model_dir)
    together = bench.submit(prompt, n=4, **options)
    bench.drain()
    tight = Bench(model_dir, num_blocks=8, max_num_seqs=2, enable_prefix_cache=False)
    apart = tight.submit(prompt, n=4, **options)
    tight.drain()
    assert prefill_tokens(tight) > 2 * len(prompt), "there was never room for all at once"
    rows = [got.token_ids for got in bench.received[together]]
    assert rows == [got.token_ids for got in tight.received[apart]]
    assert len({tuple(row) for row in rows}) == 4


def test_more_sequences_than_run_at_once_find_the_prompt_later(model_dir: Path) -> None:
    bench, (prompt,) = Bench(model_dir, max_num_seqs=2), prompts(32)
    request_id = bench.submit(prompt, max_tokens=5, ignore_eos=True, n=5)
    assert bench.engine.stats().waiting == 5
    bench.step()
    assert (bench.engine.stats().running, bench.engine.stats().waiting) == (2, 3)
    bench.drain()
    assert prefill_tokens(bench) == 32 + 3
    assert len({tuple(row.token_ids) for row in bench.received[request_id]}) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_at_any_stage_frees_all_siblings(model_dir: Path, steps: int) -> None:
    bench, (prompt,) = Bench(model_dir, max_batched_tokens=32, max_num_seqs=4), prompts(40)
    request_id = bench.submit(prompt, max_tokens=20, n=6)
    for _ in range(steps):
        bench.step()
    bench.abort(request_id)
    bench.step()
    bench.check_empty()


def test_broken_logits_of_a_prompt_end_all_siblings(model_dir: Path) -> None:
    bench, (prompt,) = Bench(model_dir), prompts(40)
    poison(bench, lambda length, tokens: length == 40)
    victim = bench.submit(prompt, max_tokens=20, n=3)
    bench.drain()
    assert list(bench.errors) == [victim]
    assert bench.engine.stats().extra["kv_blocks_cached"] == 0


# ------------------------------------------------------------------------------------------------ prompt logprobs


@pytest.mark.parametrize("length", [40, 48])
def test_prompt_logprobs_come_with_what_is_found(model_dir: Path, length: int) -> None:
    bench, (prompt, more) = Bench(model_dir), prompts(length, 20, seed=7)
    alone = Bench(model_dir, enable_prefix_cache=False)
    assert metrics(ask(bench, prompt)).cached_tokens == 0
    first = ask(bench, prompt, prompt_logprobs=3)
    assert metrics(first).cached_tokens == 0, "nobody had asked for any"
    again = ask(bench, prompt, prompt_logprobs=3)
    fewer = ask(bench, prompt, prompt_logprobs=1)
    extended = ask(bench, prompt + more, prompt_logprobs=2)
    wanted = [47 if length == 48 else 31, 47 if length == 48 else 31, length // 16 * 16 - 1]
    assert [metrics(got).cached_tokens for got in (again, fewer, extended)] == wanted
    for got, asked, top in ((first, prompt, 3), (again, prompt, 3), (fewer, prompt, 1), (extended, prompt + more, 2)):
        assert_same_scores(got, ask(alone, asked, prompt_logprobs=top))


def assert_same_scores(got: Received, expected: Received) -> None:
    assert got.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == len(expected.prompt_logprobs)
    for mine, theirs in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert [entry.token_id for entry in mine[:1]] == [entry.token_id for entry in theirs[:1]]
        assert [entry.logprob for entry in mine] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)


def test_more_candidates_than_are_known_are_computed(model_dir: Path) -> None:
    bench, (prompt,) = Bench(model_dir), prompts(40)
    ask(bench, prompt, prompt_logprobs=1)
    got = ask(bench, prompt, prompt_logprobs=2)
    assert metrics(got).cached_tokens == 0
    assert_same_scores(got, ask(Bench(model_dir, enable_prefix_cache=False), prompt, prompt_logprobs=2))
    assert metrics(ask(bench, prompt, prompt_logprobs=2)).cached_tokens == 31


# --------------------------------------------------------------------------------------------------- all together


class Alone:
    """What every prompt continues with in an engine of its own without a prefix cache, and by how much each token won."""

    def __init__(self, model_dir: Path, reference: Reference, count: int) -> None:
        self.bench = Bench(model_dir, enable_prefix_cache=False)
        self.reference, self.count = reference, count
        self.known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def __call__(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        key = tuple(prompt)
        if key not in self.known:
            tokens = ask(self.bench, prompt, max_tokens=self.count).token_ids
            rows = self.reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            best = rows.topk(2, dim=-1).values
            self.known[key] = (tokens, (best[:, 0] - best[:, 1]).tolist())
        return self.known[key]


@pytest.fixture(scope="module")
def alone(model_dir: Path, reference: Reference) -> Alone:
    return Alone(model_dir, reference, 30)


def traffic(pick: random.Random, requests: int) -> Iterator[tuple[list[int], int, int]]:
    """(prompt, new tokens, n): few beginnings, several ends, so that blocks are shared, hit, lost and computed anew."""
    beginnings = prompts(0, 7, 16, 33, 50, seed=21)
    ends = prompts(*range(1, 20, 2), seed=22)
    for _ in range(requests):
        yield (
            pick.choice(beginnings) + pick.choice(ends),
            pick.choice([1, 2, 5, 10, 30]),
            pick.choice([1, 1, 1, 1, 2, 3]),
        )


@pytest.mark.parametrize(
    ("requests", "settings", "preempted"),
    [
        (1500, {"block_size": 4, "num_blocks": 32, "max_num_seqs": 12, "max_batched_tokens": 40}, 10),
        (500, {"block_size": 16, "num_blocks": 11, "max_num_seqs": 8, "max_batched_tokens": 64}, 2),
    ],
    ids=["small blocks", "blocks of 16"],
)
@pytest.mark.timeout(900)
def test_thousands_of_requests_get_the_tokens_that_each_gets_alone(
    model_dir: Path, alone: Alone, requests: int, settings: dict, preempted: int
) -> None:
    """Random arrivals, priorities and aborts, forks, shared prefixes, and a cache of so few blocks that many are
    preempted; in the end nothing is owned."""
    pick, bench = random.Random(5), Bench(model_dir, **settings)
    asked: dict[int, list[int]] = {}
    for prompt, new_tokens, n in traffic(pick, requests):
        request_id = bench.submit(
            prompt, max_tokens=new_tokens, ignore_eos=True, n=n, priority=pick.choice([0, 0, 0, 1, -1])
        )
        asked[request_id] = prompt
        if pick.random() < 0.15:
            doomed = pick.choice(list(bench.open))
            bench.abort(doomed)
            del asked[doomed]
        while len(bench.open) > 12 or (bench.open and pick.random() < 0.5):
            bench.step()
    bench.drain()
    assert not bench.errors
    for request_id, prompt in asked.items():
        tokens, margins = alone(prompt)
        for got in bench.received[request_id]:
            count = len(got.token_ids)
            assert got.finish_reason == "length"
            assert_greedy(got.token_ids, (tokens[:count], margins[:count]))
    stats, tables = bench.engine.stats(), bench.engine._scheduler.tables
    assert stats.preemptions >= preempted
    assert stats.extra["cache_hits"] > 0.3 * stats.extra["cache_queries"]
    assert [tables.pool.references(block) for block in range(settings["num_blocks"])] == [0] * settings["num_blocks"]
    assert (tables.copies, tables.suspects) == ([], [])


def test_margins_are_small_only_at_ties(model_dir: Path, reference: Reference) -> None:
    """The guard against ties excuses few tokens: most are won by far more."""
    _, margins = reference.greedy(prompts(30)[0], 100)
    assert sum(margin < MARGIN for margin in margins) <= 1
    assert torch.tensor(margins).median() > 100 * MARGIN
