"""The whole engine on a tiny random Llama, against transformers."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import Struct, field
from transformers import LlamaForCausalLM

from tests.tp.conftest import LIMIT, VOCAB
from tllm_core.contracts.interfaces import EngineContext
from tllm_core.contracts.messages import (
    EngineInfo,
    EngineRequest,
    IterationStats,
    Output,
    RequestMetrics,
    SamplingParams,
    TokenIds,
    TokenLogprobs,
)
from tllm_core.engines.tp import TpSettings
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.errors import ConfigError, RequestError

MARGIN = 1e-4
"""Two best logits that are closer than this may change places when a matrix product has another number of rows."""


class Reference:
    """What transformers generates greedily, and by how much each token won."""

    def __init__(self, directory: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(directory).eval()

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            result = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(result.logits)[:, 0].topk(2, dim=-1).values
        return result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


class Context(EngineContext):
    rank, world_size, rendezvous = 0, 1, None

    def wake(self) -> None:
        raise AssertionError("this engine has no thread that could wake anybody")

    def phase(self, name: str, done: float | None = None) -> None:
        assert name
        assert done is None or 0 <= done <= 1

    def adopt(self, pid: int) -> None:
        raise AssertionError("this engine starts no process")


class Received(Struct):
    """All that came for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None


class Bench:
    """Drives one engine as the worker does, and checks what every output must obey."""

    def __init__(self, model_dir: Path, **settings) -> None:
        self.engine = TpEngine(TpSettings(**{"model": str(model_dir), "threads": 1, "num_blocks": 64} | settings))
        self.info: EngineInfo = self.engine.start(Context())
        self.received: dict[int, list[Received]] = {}
        self.errors: dict[int, str] = {}
        self.open: dict[int, int] = {}
        self.again = False
        self.ids = 0

    def submit(self, prompt: list[int], priority: int = 0, cache_salt: str | None = None, **sampling) -> int:
        self.ids += 1
        params = SamplingParams(**sampling)
        request = EngineRequest(
            request_id=self.ids,
            prompt_token_ids=TokenIds.of(prompt),
            sampling=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.engine.submit(request)
        self.received[self.ids] = [Received() for _ in range(params.n)]
        self.open[self.ids] = params.n
        return self.ids

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)
        self.open.pop(request_id, None)

    def step(self) -> list[Output]:
        step = self.engine.step()
        for output in step.outputs:
            self.take(output)
        assert step.again or not self.open, "requests are pending and the engine wants no step"
        return list(step.outputs)

    def take(self, output: Output) -> None:
        assert output.request_id in self.open, "an output after the end"
        if output.error is not None:
            self.errors[output.request_id] = output.error.message
            del self.open[output.request_id]
            return
        got = self.received[output.request_id][output.index]
        assert got.finish_reason is None, "an output after the end"
        got.token_ids += output.token_ids
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            got.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            assert got.prompt_logprobs is None
            got.prompt_logprobs = list(output.prompt_logprobs)
        got.finish_reason, got.stop_reason = output.finish_reason, output.stop_reason
        got.metrics = output.metrics
        if output.finish_reason is not None:
            self.open[output.request_id] -= 1
            assert (output.metrics is not None) == (self.open[output.request_id] == 0)
            if not self.open[output.request_id]:
                del self.open[output.request_id]

    def drain(self) -> None:
        while self.open:
            self.step()
        assert not self.engine.step().again
        self.check_empty()

    def check_empty(self) -> IterationStats:
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert not self.engine._live
        return stats

    def tokens(self, request_id: int, index: int = 0) -> list[int]:
        return self.received[request_id][index].token_ids

    def alone(self, prompt: list[int], **sampling) -> Received:
        request_id = self.submit(prompt, **sampling)
        self.drain()
        return self.received[request_id][0]


@pytest.fixture(scope="module")
def bench(model_dir: Path) -> Bench:
    return Bench(model_dir)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    pick = random.Random(seed)
    return [[pick.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def assert_greedy(got: list[int], expected: tuple[list[int], list[float]]) -> None:
    tokens, margins = expected
    for at, (mine, theirs) in enumerate(zip(got, tokens, strict=True)):
        if mine != theirs:
            assert margins[at] < MARGIN, f"token {at} differs at a margin of {margins[at]}"
            return


# ------------------------------------------------------------------------------------------- the model's tokens


def test_greedy_equals_transformers_alone_and_together(bench: Bench, reference: Reference) -> None:
    asked = prompts(1, 5, 17, 64, 100)
    expected = [reference.greedy(prompt, 24) for prompt in asked]
    for prompt, tokens in zip(asked, expected, strict=True):
        assert_greedy(bench.alone(prompt, max_tokens=24, ignore_eos=True).token_ids, tokens)
    together = [bench.submit(prompt, max_tokens=24, ignore_eos=True) for prompt in asked]
    bench.drain()
    for request_id, tokens in zip(together, expected, strict=True):
        assert_greedy(bench.tokens(request_id), tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_seqs": 2},
        {"block_size": 2, "num_blocks": 72, "max_batched_tokens": 16, "max_num_seqs": 16},
        {"block_size": 1, "num_blocks": 300},
    ],
    ids=["small chunks", "few sequences", "preemption", "blocks of one token"],
)
def test_greedy_is_the_same_under_arrivals_aborts_and_pressure(
    model_dir: Path, reference: Reference, settings: dict
) -> None:
    bench, pick = Bench(model_dir, **settings), random.Random(1)
    kept: dict[int, list[int]] = {}
    doomed: list[int] = []
    for at, prompt in enumerate(prompts(40, 3, 90, 21, 60, 33, 8, 120, 15, 50, seed=3)):
        request_id = bench.submit(prompt, max_tokens=20, ignore_eos=True, priority=pick.choice([0, 0, 1]))
        if at % 3 == 2:
            doomed.append(request_id)
        else:
            kept[request_id] = prompt
        for _ in range(pick.randint(0, 4)):
            bench.step()
        if doomed and pick.random() < 0.5:
            bench.abort(doomed.pop())
    for request_id in doomed:
        bench.abort(request_id)
    bench.drain()
    for request_id, prompt in kept.items():
        assert_greedy(bench.tokens(request_id), reference.greedy(prompt, 20))
        assert bench.received[request_id][0].finish_reason == "length"
    assert (bench.engine.stats().preemptions > 0) == (settings.get("num_blocks") == 72)


def test_seeded_requests_do_not_depend_on_company_or_preemption(model_dir: Path) -> None:
    options = [
        {"temperature": 1.0, "seed": 5, "n": 2},
        {"temperature": 0.8, "top_p": 0.9, "seed": 6, "frequency_penalty": 0.5},
        {"temperature": 1.2, "top_k": 30, "min_p": 0.01, "seed": 7, "repetition_penalty": 1.2},
    ]
    asked = prompts(30, 45, 12, seed=8)
    roomy, tight = Bench(model_dir), Bench(model_dir, num_blocks=9)
    alone = []
    for prompt, sampling in zip(asked, options, strict=True):
        request_id = roomy.submit(prompt, max_tokens=30, ignore_eos=True, **sampling)
        roomy.drain()
        alone.append([got.token_ids for got in roomy.received[request_id]])
    tight.submit(prompts(50)[0], max_tokens=40, temperature=1.0)
    ids = [tight.submit(p, max_tokens=30, ignore_eos=True, **s) for p, s in zip(asked, options, strict=True)]
    tight.drain()
    assert tight.engine.stats().preemptions > 0
    assert [[got.token_ids for got in tight.received[request_id]] for request_id in ids] == alone
    assert alone[0][0] != alone[0][1]


def test_a_seed_in_the_settings_repeats_unseeded_requests(model_dir: Path) -> None:
    (prompt,) = prompts(10)
    runs = []
    for seed in (1, 1, 2):
        bench = Bench(model_dir, seed=seed)
        runs.append([bench.alone(prompt, temperature=1.0, max_tokens=12).token_ids for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


# --------------------------------------------------------------------------------------------------- endings


def first_seen(tokens: list[int], least: int) -> int:
    """A place at or after `least` whose token did not come before."""
    return next(at for at in range(least, len(tokens)) if tokens[at] not in tokens[:at])


def test_a_stop_token_ends_and_is_delivered_only_on_request(bench: Bench) -> None:
    (prompt,) = prompts(20, seed=4)
    whole = bench.alone(prompt, max_tokens=30, ignore_eos=True, temperature=1.0, seed=1).token_ids
    at = first_seen(whole, 5)
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 1, "stop_token_ids": (whole[at],)}
    ended = bench.alone(prompt, logprobs=0, **sampling)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (whole[:at], "stop", whole[at])
    assert ended.metrics is not None
    assert ended.metrics.generated_tokens == at + 1
    shown = bench.alone(prompt, logprobs=0, include_stop_str_in_output=True, **sampling)
    assert (shown.token_ids, shown.stop_reason) == (whole[: at + 1], whole[at])


def test_the_models_own_end_has_no_stop_reason_and_can_be_ignored(
    model_dir: Path, bench: Bench, tmp_path: Path
) -> None:
    (prompt,) = prompts(20, seed=4)
    sampling = {"max_tokens": 30, "temperature": 1.0, "seed": 1}
    whole = bench.alone(prompt, ignore_eos=True, **sampling).token_ids
    at = first_seen(whole, 5)
    other = Bench(with_eos(model_dir, tmp_path / "eos", whole[at]))
    assert other.info.eos_token_ids == (whole[at],)
    ended = other.alone(prompt, **sampling)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (whole[:at], "stop", None)
    assert other.alone(prompt, ignore_eos=True, **sampling).token_ids == whole
    named = other.alone(prompt, stop_token_ids=(whole[at],), **sampling)
    assert named.stop_reason == whole[at]
    held = other.alone(prompt, min_tokens=25, **sampling)
    assert whole[at] not in held.token_ids[:25]
    assert len(held.token_ids) >= 25


def with_eos(model_dir: Path, target: Path, token: int) -> Path:
    shutil.copytree(model_dir, target)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(content | {"eos_token_id": token}))
    return target


@pytest.mark.parametrize("length", [LIMIT - 56, LIMIT - 1])
def test_without_max_tokens_it_runs_until_the_limit(bench: Bench, length: int) -> None:
    (prompt,) = prompts(length)
    got = bench.alone(prompt, ignore_eos=True)
    assert (len(got.token_ids), got.finish_reason) == (LIMIT - length, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "field", "numbers"),
    [
        (LIMIT, None, "prompt_token_ids", (LIMIT,)),
        (LIMIT + 1, 1, "prompt_token_ids", (LIMIT + 1, LIMIT)),
        (10_000, None, "prompt_token_ids", (10_000, LIMIT)),
        (200, 100, "max_tokens", (200, 100, LIMIT)),
    ],
)
def test_more_than_the_advertised_limit_is_refused_with_the_numbers(
    bench: Bench, length: int, max_tokens: int | None, field: str, numbers: tuple[int, ...]
) -> None:
    assert bench.info.max_seq_len == LIMIT
    with pytest.raises(RequestError) as caught:
        bench.submit(prompts(length)[0], max_tokens=max_tokens)
    assert caught.value.field == field
    assert all(str(number) in str(caught.value) for number in numbers)
    bench.check_empty()


def test_a_request_that_the_cache_can_never_hold_is_refused_and_small_ones_are_served(model_dir: Path) -> None:
    bench = Bench(model_dir, num_blocks=10)
    assert bench.info.max_seq_len == 160
    with pytest.raises(RequestError, match="KV cache of 160 tokens"):
        bench.submit(prompts(100)[0], max_tokens=92)
    small = [bench.submit(prompt, max_tokens=10) for prompt in prompts(10, 10, 10, 10, 10)]
    bench.drain()
    assert all(bench.received[request_id][0].finish_reason for request_id in small)


def test_n_sequences_end_once_each_with_their_own_index(bench: Bench) -> None:
    (prompt,) = prompts(12)
    request_id = bench.submit(prompt, n=3, temperature=1.5, seed=3, max_tokens=15, prompt_logprobs=0, logprobs=1)
    bench.drain()
    rows = bench.received[request_id]
    assert len({tuple(row.token_ids) for row in rows}) == 3
    assert [row.prompt_logprobs is not None for row in rows] == [True, False, False]
    metrics = [row.metrics for row in rows if row.metrics is not None]
    assert [m.prompt_tokens for m in metrics] == [12]
    assert rows[0].token_ids == bench.alone(prompt, temperature=1.5, seed=3, max_tokens=15).token_ids


# --------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batched_tokens": 4, "max_num_seqs": 4},
        {"max_batched_tokens": 2, "max_num_seqs": 2, "block_size": 2, "num_blocks": 41},
    ],
    ids=["one piece", "chunks", "preempted in its prompt"],
)
def test_logprobs_of_prompt_and_output_equal_transformers(
    model_dir: Path, reference: Reference, settings: dict
) -> None:
    bench = Bench(model_dir, **settings)
    prompt, other = prompts(37, 30, seed=5)
    bench.submit(other, max_tokens=50, ignore_eos=True, priority=-1)
    request_id = bench.submit(
        prompt, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=0.9, seed=2
    )
    bench.drain()
    assert (bench.engine.stats().preemptions > 0) == ("block_size" in settings)
    got = bench.received[request_id][0]
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == len(prompt)
    assert list(got.prompt_logprobs[0]) == []
    tokens = prompt + got.token_ids
    scores = torch.log_softmax(reference.logits(tokens), -1)
    for at, entries in enumerate([*got.prompt_logprobs, *got.logprobs][1:], 1):
        row = scores[at - 1]
        assert entries[0].token_id == tokens[at]
        assert entries[0].logprob == pytest.approx(float(row[tokens[at]]), abs=1e-4)
        assert abs(entries[0].rank - 1 - int((row > row[tokens[at]]).sum())) <= 1
        top = row.topk(len(entries) - 1).values.tolist()
        assert [entry.logprob for entry in entries[1:]] == pytest.approx(top, abs=1e-4)
        assert len(entries) == (3 if at < len(prompt) else 4)


# ----------------------------------------------------------------------------------------------------- aborts


def test_abort_at_every_stage_frees_everything_and_harms_nobody(model_dir: Path, reference: Reference) -> None:
    bench = Bench(model_dir, max_batched_tokens=16, max_num_seqs=4)
    steady, long, late = prompts(10, 120, 30, seed=6)
    kept = bench.submit(steady, max_tokens=40, ignore_eos=True)
    stages = []
    for steps, stage in [(0, "waiting"), (3, "in its prompt"), (12, "decoding")]:
        request_id = bench.submit(long, max_tokens=50, ignore_eos=True, n=2)
        for _ in range(steps):
            bench.step()
        stages.append((stage, len(bench.received[request_id][0].token_ids) > 0))
        bench.abort(request_id)
        bench.abort(request_id)
        bench.step()
    assert stages == [("waiting", False), ("in its prompt", False), ("decoding", True)]
    ended = bench.submit(late, max_tokens=1)
    bench.drain()
    bench.abort(ended)
    bench.abort(10**9)
    assert_greedy(bench.tokens(kept), reference.greedy(steady, 40))


def test_abort_of_a_preempted_request_frees_it(model_dir: Path) -> None:
    bench = Bench(model_dir, num_blocks=8)
    first, second = prompts(40, 40, seed=9)
    kept = bench.submit(first, max_tokens=60, ignore_eos=True)
    victim = bench.submit(second, max_tokens=60, ignore_eos=True)
    while not bench.engine.stats().preemptions:
        bench.step()
    assert bench.engine.stats().waiting == 1
    bench.abort(victim)
    bench.drain()
    assert len(bench.tokens(kept)) == 60


# ----------------------------------------------------------------------------------------------------- errors


def poison(bench: Bench, is_victim: Callable[[int, list[int]], bool]) -> None:
    """Puts NaN into the last row of logits of the sequences whose tokens of the step are picked."""
    execute = bench.engine._runner.execute

    def poisoned(batch):
        logits, start = execute(batch), 0
        for length, context in zip(batch.query_lens, batch.context_lens, strict=True):
            last = start + length - 1
            if last in batch.logits_rows and is_victim(context + length, batch.token_ids[start : last + 1].tolist()):
                logits[batch.logits_rows.index(last), 7] = float("nan")
            start += length
        return logits

    bench.engine._runner.execute = poisoned


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1, "top_p": 0.9, "logprobs": 2}])
@pytest.mark.parametrize("after", [25, 31])
def test_broken_logits_end_their_request_alone(
    model_dir: Path, reference: Reference, sampling: dict, after: int
) -> None:
    bench = Bench(model_dir)
    good, bad, other = prompts(10, 25, 40, seed=2)
    poison(bench, lambda length, tokens: length == after)
    victim = bench.submit(bad, max_tokens=20, ignore_eos=True, n=2, **sampling)
    kept = [bench.submit(prompt, max_tokens=10, ignore_eos=True) for prompt in (good, other)]
    bench.drain()
    assert list(bench.errors) == [victim]
    assert "not finite" in bench.errors[victim]
    assert all(len(row.token_ids) <= after - 25 + 1 for row in bench.received[victim])
    for request_id, prompt in zip(kept, (good, other), strict=True):
        assert_greedy(bench.tokens(request_id), reference.greedy(prompt, 10))


def test_broken_logits_of_a_prompt_row_end_their_request_alone(model_dir: Path) -> None:
    bench = Bench(model_dir)
    execute = bench.engine._runner.execute

    def poisoned(batch):
        logits = execute(batch)
        if len(batch.logits_rows) > 20:
            logits[3] = float("nan")
        return logits

    bench.engine._runner.execute = poisoned
    victim = bench.submit(prompts(30)[0], max_tokens=5, prompt_logprobs=1)
    kept = bench.submit(prompts(9)[0], max_tokens=5, ignore_eos=True)
    bench.drain()
    assert list(bench.errors) == [victim]
    assert len(bench.tokens(kept)) == 5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"logprobs": VOCAB + 1}, "logprobs"),
        ({"prompt_logprobs": VOCAB + 1}, "prompt_logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"stop": ("x",)}, "stop"),
        ({"n": 0}, "n"),
        ({"prompt": [VOCAB]}, "prompt_token_ids"),
        ({"prompt": []}, "prompt_token_ids"),
    ],
    ids=str,
)
def test_a_bad_value_is_named_and_a_running_stream_goes_on(bench: Bench, change: dict, field: str) -> None:
    kept = bench.submit(prompts(5)[0], max_tokens=6, ignore_eos=True)
    bench.step()
    with pytest.raises(RequestError) as caught:
        bench.submit(change.pop("prompt", [5]), **change)
    assert caught.value.field == field
    bench.drain()
    assert len(bench.tokens(kept)) == 6


# ------------------------------------------------------------------------------------------- order, stats, load


def test_more_important_requests_are_served_first(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=1)
    ids = [
        bench.submit(prompt, max_tokens=3, priority=p) for prompt, p in zip(prompts(5, 5, 5), (2, 0, 1), strict=True)
    ]
    order: list[int] = []
    while bench.open:
        order += [output.request_id for output in bench.step() if output.finish_reason]
    assert order == [ids[1], ids[2], ids[0]]


def test_stats_count_what_happened_and_return_to_zero(model_dir: Path) -> None:
    bench = Bench(model_dir, max_batched_tokens=16, max_num_seqs=4)
    for prompt in prompts(20, 6, 4):
        bench.submit(prompt, max_tokens=8, ignore_eos=True)
    bench.step()
    busy = bench.engine.stats()
    assert (busy.running, busy.waiting, busy.kv_blocks_used) == (1, 2, 2)
    bench.drain()
    stats = bench.check_empty()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.kv_blocks_total) == (30, 24, 64)
    assert stats.steps >= 8
    assert stats.last_step_s > 0


def test_an_idle_engine_does_nothing_and_asks_for_nothing(bench: Bench) -> None:
    bench.drain()
    step = bench.engine.step()
    assert (list(step.outputs), step.again) == ([], False)


def test_the_engine_says_what_it_supports(bench: Bench) -> None:
    assert bench.info.supports >= {"n", "seed", "logprobs", "prompt_logprobs", "min_tokens", "ignore_eos", "top_p"}
    assert "stop" not in bench.info.supports
    assert bench.info.vocab_size == VOCAB
    assert {"pause", "sleep", "update_weights", "kv_events"} <= set(bench.info.controls)


def test_random_traffic_of_all_kinds_leaves_nothing_behind(model_dir: Path) -> None:
    bench, pick = (
        Bench(model_dir, block_size=2, num_blocks=50, max_num_seqs=6, max_batched_tokens=24),
        random.Random(11),
    )
    for _ in range(120):
        (prompt,) = prompts(pick.randint(1, 60), seed=pick.getrandbits(30))
        request_id = bench.submit(
            prompt,
            priority=pick.choice([0, 0, 0, 1, -1]),
            n=pick.choice([1, 1, 1, 2, 3]),
            max_tokens=pick.randint(1, 24),
            temperature=pick.choice([0.0, 0.7, 1.5]),
            top_k=pick.choice([0, 0, 20]),
            top_p=pick.choice([1.0, 0.9]),
            repetition_penalty=pick.choice([1.0, 1.1]),
            logprobs=pick.choice([None, None, 2]),
            prompt_logprobs=pick.choice([None, None, None, 1]),
            stop_token_ids=tuple(pick.sample(range(VOCAB), 20)),
        )
        for _ in range(pick.randint(0, 3)):
            bench.step()
        if pick.random() < 0.2:
            bench.abort(pick.choice([request_id, pick.randint(1, request_id)]))
    bench.drain()
    stats = bench.check_empty()
    assert stats.preemptions > 0
    ended = [row for rows in bench.received.values() for row in rows if row.finish_reason]
    assert {row.finish_reason for row in ended} == {"stop", "length"}
    assert not bench.errors


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, not 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_seqs": 64, "max_batched_tokens": 32}, "max_batched_tokens 32 is below max_num_seqs 64"),
        ({"memory_fraction": 1.5}, "memory_fraction must be between 0 and 1"),
        ({"seed": -1}, "seed must be in"),
        ({"model": ""}, "model is empty"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_named(setting: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TpSettings(**setting)


# ------------------------------------------------------------------------------------------------------- best_of


def test_best_of_returns_the_likeliest_of_the_same_sequences(bench: Bench) -> None:
    prompt, fields = prompts(9)[0], {"temperature": 1.0, "seed": 4, "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
    every = bench.submit(prompt, n=6, **fields)
    bench.drain()
    scores = {
        tuple(got.token_ids): sum(entries[0].logprob for entries in got.logprobs) for got in bench.received[every]
    }
    best = bench.submit(prompt, n=2, best_of=6, prompt_logprobs=0, **fields)
    steps = 0
    while best in bench.open:
        outputs = bench.step()
        steps += 1
        assert not outputs or best not in bench.open, "which are the best is not known before the end"
    assert steps > 10
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    assert [tuple(got.token_ids) for got in bench.received[best]] == ranked[:2]
    assert all(len(got.logprobs) == 12 for got in bench.received[best])
    assert len(bench.received[best][0].prompt_logprobs or ()) == 9
    assert bench.received[best][1].prompt_logprobs is None
    bench.drain()


def test_best_of_without_logprobs_shows_none_and_can_be_aborted(bench: Bench) -> None:
    request_id = bench.submit(prompts(4)[0], best_of=3, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
    bench.drain()
    (got,) = bench.received[request_id]
    assert len(got.token_ids) == 5
    assert got.logprobs == []
    assert got.metrics is not None
    assert got.metrics.generated_tokens == 15
    request_id = bench.submit(prompts(4)[0], best_of=3, temperature=1.0, max_tokens=50, ignore_eos=True)
    for _ in range(3):
        bench.step()
    bench.abort(request_id)
    bench.drain()
