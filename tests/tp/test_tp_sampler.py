"""The sampler against a row-by-row reference in float64, and what a row gets whatever stands beside it."""

import math
import random
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tllm_core.contracts.messages import SamplingParams, TokenIds
from tllm_core.engines.tp.random import philox, uniforms
from tllm_core.engines.tp.rules import Rules
from tllm_core.engines.tp.sampler import EMPTY, FAILED, Sampler, largest
from tllm_core.engines.tp.sequence import Sequence

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make(
    prompt: list[int], *, seed: int = 0, index: int = 0, stop: tuple[int, ...] = (), vocab: int = 128, **params
) -> Sequence:
    sampling = SamplingParams(**params)
    sampling.check()
    return Sequence(
        TokenIds.of(prompt),
        sampling,
        order=(0, 0, index),
        max_len=10_000,
        seed=seed,
        stop_ids=frozenset(stop),
        rules=Rules.of(sampling, vocab, CPU),
    )


def uniform(seed: int, index: int, position: int) -> float:
    words = [np.array([value], dtype=np.uint64) for value in (seed, index, position)]
    return float(uniforms(*words)[0])


def reference(logits: torch.Tensor, sequence: Sequence) -> int:
    """One row, straight from the definitions, in Python floats."""
    params, x = sequence.sampling, [float(value) for value in logits]
    output = sequence.token_ids[sequence.prompt_len :].tolist()
    for token, bias in params.logit_bias:
        x[token] += float(np.float32(bias))
    if params.allowed_token_ids is not None:
        x = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(x)]
    for run in params.bad_token_sequences:
        if output[len(output) - len(run) + 1 :] == list(run[:-1]):
            x[run[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in sequence.stop_ids:
            x[token] = -math.inf
    for token in set(sequence.token_ids):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if max(x) == -math.inf:
        return EMPTY
    if params.temperature == 0:
        return x.index(max(x))
    best = max(x)
    scaled = [(value - best) / params.temperature for value in x]
    kept = [value if not params.min_p or value >= math.log(params.min_p) else -math.inf for value in scaled]
    if params.top_k:
        least = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        kept = [value if value >= least else -math.inf for value in kept]
    weights = [math.exp(value) for value in kept]
    probs = [weight / sum(weights) for weight in weights]
    if params.top_p < 1:
        mass, least = 0.0, 0.0
        for least in sorted(probs, reverse=True):
            mass += least
            if mass >= params.top_p:
                break
        probs = [prob if prob >= least else 0.0 for prob in probs]
    target, mass = uniform(sequence.seed, sequence.index, len(output)) * sum(probs), 0.0
    for token, prob in enumerate(probs):
        mass += prob
        if mass > target:
            return token
    raise AssertionError("the reference found no token")


def some_params(pick: random.Random, vocab: int) -> dict:
    """Any mixture of options, each off half of the time."""
    few = [pick.randrange(vocab) for _ in range(4)]
    allowed = pick.sample(range(vocab), pick.choice([3, vocab // 2]))
    biased = pick.sample(range(vocab), pick.choice([1, 5, min(vocab, 700)]))
    options = {
        "temperature": pick.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        "top_k": pick.choice([0, 1, 5, 40, 5000]),
        "top_p": pick.choice([1.0, 0.1, 0.5, 0.9, 0.99]),
        "min_p": pick.choice([0.0, 0.01, 0.2]),
        "repetition_penalty": pick.choice([1.0, 0.7, 1.3]),
        "presence_penalty": pick.choice([0.0, 1.5, -0.5]),
        "frequency_penalty": pick.choice([0.0, 0.8, -0.3]),
        "min_tokens": pick.choice([0, 2, 5]),
        "allowed_token_ids": allowed,
        "logit_bias": {token: pick.choice([-100, -1.5, 0, 3.25, 8]) for token in biased},
        # Of few different tokens, so that runs do come about.
        "bad_token_sequences": [[pick.choice(few) for _ in range(pick.randint(1, 3))] for _ in range(5)]
        + [[a, b] for a in allowed[:3] for b in allowed[:3] if pick.random() < 0.5],
    }
    return {name: value for name, value in options.items() if pick.random() < 0.5 or name == "temperature"}


def some_sequence(pick: random.Random, vocab: int) -> Sequence:
    prompt = [pick.randrange(vocab) for _ in range(pick.randint(1, 30))]
    stop = tuple(pick.randrange(vocab) for _ in range(pick.randint(0, 2)))
    return make(
        prompt, seed=pick.getrandbits(63), index=pick.randrange(3), stop=stop, vocab=vocab, **some_params(pick, vocab)
    )


def logits_for(sequence: Sequence, vocab: int) -> torch.Tensor:
    """A model that depends on seed, index and position alone."""
    generator = torch.Generator().manual_seed(sequence.seed % 2**50 * 4096 + sequence.index * 1024 + sequence.generated)
    return torch.randn(vocab, generator=generator) * 3


def step(sampler: Sampler, sequences: list[Sequence], vocab: int) -> list[int]:
    tokens = sampler.sample(torch.stack([logits_for(s, vocab) for s in sequences]), list(sequences)).token_ids
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.token_ids.append(max(token, 0))
    return tokens


# Published with the algorithm (Random123's kat_vectors): counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_generator_is_philox4x32_10(counter: str, key: str, result: str) -> None:
    words = [np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64) for text in (counter, key)]
    assert " ".join(f"{int(word):08x}" for word in philox(*words)[:, 0]) == result


def test_random_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    many, zeros = np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.uint64)
    for columns in ((many, zeros, zeros), (zeros, zeros, many), (zeros, many, zeros)):
        numbers = uniforms(*columns)
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 170  # 99 degrees of freedom: 1 in 100,000
        assert 0 <= numbers.min() < numbers.max() < 1


@pytest.mark.parametrize("vocab", [101, 256, 1024])
def test_every_row_of_a_mixed_batch_equals_the_naive_reference(vocab: int) -> None:
    pick, sampler = random.Random(vocab), Sampler(CPU)
    for _ in range(12):
        sequences = [some_sequence(pick, vocab) for _ in range(pick.randint(1, 8))]
        for _ in range(7):
            expected = [reference(logits_for(s, vocab), s) for s in sequences]
            assert step(sampler, sequences, vocab) == expected
            sequences = [s for s, token in zip(sequences, expected, strict=True) if token >= 0]
            if not sequences:
                break


@pytest.mark.parametrize("vocab", [997, 6400])
def test_a_rows_tokens_do_not_depend_on_neighbours_order_or_preemption(vocab: int) -> None:
    pick = random.Random(7)
    watched = [some_sequence(pick, vocab) for _ in range(6)]
    alone: list[list[int]] = []
    for sequence in watched:
        sampler, mine = Sampler(CPU), copy_of(sequence)
        alone.append([max(step(sampler, [mine], vocab)[0], 0) for _ in range(20)])
    sampler, present = Sampler(CPU), list(watched)
    while present:
        company = [some_sequence(pick, vocab) for _ in range(pick.randint(0, 3))]
        chosen = pick.sample(present, pick.randint(1, len(present)))  # the others are preempted for now
        batch = chosen + company
        pick.shuffle(batch)
        for _ in range(pick.randint(1, 3)):
            step(sampler, batch, vocab)
        present = [sequence for sequence in present if sequence.generated < 20]
    for sequence, tokens in zip(watched, alone, strict=True):
        assert sequence.token_ids[sequence.prompt_len :].tolist()[:20] == tokens


def copy_of(sequence: Sequence) -> Sequence:
    return Sequence(
        TokenIds(sequence.token_ids[: sequence.prompt_len].tobytes()),
        sequence.sampling,
        order=sequence.order,
        max_len=sequence.max_len,
        seed=sequence.seed,
        stop_ids=sequence.stop_ids,
        rules=sequence.rules,
    )


def test_draws_follow_the_softmax() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
    sequences = [make([1], seed=seed, temperature=0.8) for seed in range(20_000)]
    tokens = Sampler(CPU).sample(logits.expand(20_000, 40), sequences).token_ids
    expected = torch.softmax(logits / 0.8, -1).double().numpy() * 20_000
    counts = np.bincount(tokens, minlength=40)
    assert ((counts - expected) ** 2 / expected).sum() < 90  # 39 degrees of freedom: 1 in 100,000


def test_ties_at_the_edge_of_a_filter_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for filters in ({"top_k": 2}, {"top_p": 0.6}):
        sampler = Sampler(CPU)
        seen = {
            sampler.sample(logits.clone(), [make([0], seed=seed, temperature=1.0, **filters)]).token_ids[0]
            for seed in range(200)
        }
        assert seen == {0, 1, 2, 3}


def test_a_flat_distribution_needs_all_widths_of_the_nucleus() -> None:
    vocab = 9000
    logits = torch.zeros(1, vocab)
    logits[0, 17] = -1e9
    sequence = make([0], temperature=1.0, top_p=0.9999)
    assert Sampler(CPU).sample(logits.clone(), [sequence]).token_ids == [
        int(uniform(0, 0, 0) * (vocab - 1)) + (uniform(0, 0, 0) * (vocab - 1) >= 17)
    ]


def test_tiny_and_huge_temperatures_stay_finite() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 1e4
    cold = make([0], temperature=1e-30)
    hot = make([0], temperature=100.0)
    tokens = Sampler(CPU).sample(logits.clone(), [cold, hot]).token_ids
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] != FAILED


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1.4e-45, 1e-38, 1.1e-38])
def test_a_temperature_that_underflows_is_greedy(temperature: float) -> None:
    """Also among equals, where the first is taken."""
    logits = torch.tensor([[0.0, 1e-40, 2e-40, -5.0] * 16, [3.0, 7.0, 7.0, 1.0] * 16])
    expected = largest(logits)[1].tolist()
    assert expected == [2, 1]
    for seed in range(20):
        rows = [make([0], seed=seed, temperature=temperature, top_p=top_p, top_k=2, min_p=0.1) for top_p in (1.0, 0.5)]
        assert Sampler(CPU).sample(logits.clone(), rows).token_ids == expected
        warm = make([0], seed=seed, temperature=1.0)
        assert Sampler(CPU).sample(logits.clone(), [warm, rows[1]]).token_ids[1] == expected[1]


@pytest.mark.parametrize("temperature", [1.2e-38, 2e-38, 1e-37, 1e-30])
def test_a_temperature_just_above_draws_among_the_equal_alone(temperature: float) -> None:
    logits = torch.tensor([[3.0, 7.0, 7.0, 1.0] * 16])
    drawn = {
        Sampler(CPU).sample(logits.clone(), [make([0], seed=seed, temperature=temperature)]).token_ids[0]
        for seed in range(40)
    }
    assert len(drawn) > 5
    assert {token % 4 for token in drawn} == {1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 3},
        {"repetition_penalty": 2.0},
        {"logit_bias": {100: 5.0}},
        {"allowed_token_ids": tuple(range(100))},
        {"bad_token_sequences": ((100,),)},
    ],
)
def test_a_broken_row_fails_alone(bad: float, params: dict) -> None:
    logits = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    good = Sampler(CPU).sample(logits.clone(), [make([1], seed=at, **params) for at in range(3)]).token_ids
    logits[1, 100] = bad
    sequences = [make([1], seed=at, logprobs=2, **params) for at in range(3)]
    tokens, logprobs = Sampler(CPU).sample(logits, sequences)
    assert tokens == [good[0], FAILED, good[2]]
    assert logprobs is not None
    assert [entries is None for entries in logprobs] == [False, True, False]


EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.0, 5e-324, 1.2e-38, 100.0],
    "repetition_penalty": [5e-324, 1e-300, 1e-38, 100.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [(), tuple((token, -100.0) for token in range(128)), ((3, 100.0),)],
    "top_p": [5e-324, 1.0],
    "min_p": [0.0, 5e-324, 1.0],
    "top_k": [0, 1, 2**31 - 1],
}


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
def test_finite_logits_never_fail_whatever_a_request_makes_of_them(scale: float) -> None:
    pick = random.Random(5)
    logits = torch.randn(1, 128, generator=torch.Generator().manual_seed(2)).clamp(-3, 3) * scale
    seen = [0, 3, int(logits.argmax()), int(logits.argmin())]
    for _ in range(300):
        params = {name: pick.choice(values) for name, values in EXTREMES.items()}
        sequence = make([0, 3], **params)
        sequence.token_ids.extend(seen)
        (token,) = Sampler(CPU).sample(logits.clone(), [sequence]).token_ids
        assert 0 <= token < 128, params


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-45])
def test_a_repetition_penalty_near_0_takes_the_likeliest_of_what_was_seen(penalty: float) -> None:
    logits = torch.tensor([[9.0, 2.0, 3.0, -1.0] * 16])
    assert Sampler(CPU).sample(logits, [make([1, 2, 3], repetition_penalty=penalty)]).token_ids == [2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_penalty_hides_that_the_models_own_logits_are_broken(value: float) -> None:
    logits = torch.zeros(1, 64)
    logits[0, 5] = value
    assert Sampler(CPU).sample(logits, [make([5, 6], repetition_penalty=1e-300)]).token_ids == [FAILED]


def test_a_row_that_is_masked_everywhere_fails() -> None:
    logits = torch.full((1, 128), -math.inf)
    assert Sampler(CPU).sample(logits, [make([1])]).token_ids == [FAILED]


def test_single_masked_tokens_are_no_failure() -> None:
    logits = torch.full((1, 128), -math.inf)
    logits[0, 5] = 1.0
    assert Sampler(CPU).sample(logits, [make([1], temperature=1.0, top_p=0.5)]).token_ids == [5]


def test_stop_ids_cannot_come_before_min_tokens_and_can_after() -> None:
    sampler, logits = Sampler(CPU), torch.zeros(1, 64)
    logits[0, 7], logits[0, 9], logits[0, 11] = 3.0, 2.0, 1.0
    sequence = make([0], stop=(7, 9), min_tokens=3)
    tokens = []
    for _ in range(5):
        tokens += sampler.sample(logits.clone(), [sequence]).token_ids
        sequence.token_ids.append(tokens[-1])
    assert tokens == [11, 11, 11, 7, 7]


def test_penalties_count_over_more_steps_than_there_is_room_for() -> None:
    vocab, sampler = 64, Sampler(CPU)
    sequence = make([3, 4], frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.1)
    base = torch.linspace(0, 2, vocab)
    for _ in range(150):
        expected = reference(base, sequence)
        assert sampler.sample(base.clone().unsqueeze(0), [sequence]).token_ids == [expected]
        sequence.token_ids.append(expected)
    assert len(set(sequence.token_ids)) > 30


def test_logprobs_are_of_the_raw_logits_sampled_first_then_the_best() -> None:
    logits = torch.randn(3, 128, generator=torch.Generator().manual_seed(5))
    raw = torch.log_softmax(logits, -1)
    sequences = [
        make([1], logprobs=3, temperature=2.0, seed=11),
        make([1]),
        make([int(logits[2].argmax())], logprobs=0, repetition_penalty=100.0),
    ]
    tokens, logprobs = Sampler(CPU).sample(logits, sequences)
    assert logprobs is not None
    assert logprobs[1] is None
    for row, top in ((0, 3), (2, 0)):
        entries = logprobs[row]
        assert entries is not None
        assert len(entries) == 1 + top
        assert entries[0].token_id == tokens[row]
        assert entries[0].logprob == pytest.approx(float(raw[row, tokens[row]]))
        assert entries[0].rank == 1 + int((raw[row] > raw[row, tokens[row]]).sum())
        assert [entry.token_id for entry in entries[1:]] == raw[row].topk(top).indices.tolist()
        assert [entry.rank for entry in entries[1:]] == list(range(1, top + 1))
    assert logprobs[2] is not None
    assert logprobs[2][0].rank > 1


def test_equal_logits_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    (entries,) = Sampler(CPU).sample(logits, [make([0], logprobs=4)]).logprobs or [None]
    assert entries is not None
    assert [entry.rank for entry in entries] == [1, 1, 1, 3, 4]


@pytest.mark.parametrize("vocab", [1, 63, 64, 128, 1000, 2048])
def test_largest_is_the_first_of_the_largest(vocab: int) -> None:
    logits = torch.randint(0, 9, (20, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    values, indices = largest(logits)
    assert values.tolist() == logits.amax(-1).tolist()
    assert indices.tolist() == [row.index(max(row)) for row in logits.tolist()]
    logits[3, vocab // 2] = math.nan
    assert largest(logits)[0].isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("alone", [True, False])
def test_logprobs_are_raw_whatever_is_done_to_the_logits(alone: bool) -> None:
    logits = torch.randn(1 if alone else 2, 128, generator=torch.Generator().manual_seed(9))
    raw = torch.log_softmax(logits, -1)[0]
    ruled = make([1, 2], logprobs=2, repetition_penalty=1.5, min_tokens=3, stop=(5,), logit_bias={7: 50.0})
    (entries, *_) = Sampler(CPU).sample(logits, [ruled] if alone else [ruled, make([1])]).logprobs or [None]
    assert entries is not None
    assert entries[0].token_id == 7
    assert entries[0].logprob == pytest.approx(float(raw[7]))
    assert [entry.token_id for entry in entries[1:]] == raw.topk(2).indices.tolist()


def test_ranked_sequences_get_their_tokens_logprobs() -> None:
    logits = torch.randn(2, 128, generator=torch.Generator().manual_seed(9))
    raw = torch.log_softmax(logits, -1)
    tokens, logprobs = Sampler(CPU).sample(logits, [make([1]), make([1], best_of=2)])
    assert logprobs is not None
    assert logprobs[0] is None
    assert logprobs[1] is not None
    assert logprobs[1][0].logprob == pytest.approx(float(raw[1, tokens[1]]))


def test_a_row_whose_rules_leave_nothing_is_empty_and_others_are_not() -> None:
    logits = torch.zeros(3, 128)
    nothing = make([1], allowed_token_ids=[4, 5], bad_token_sequences=[[4], [5]])
    assert Sampler(CPU).sample(logits, [make([1]), nothing, make([1])]).token_ids == [0, EMPTY, 0]


def test_min_tokens_keeps_stop_ids_out_even_where_nothing_else_is_allowed() -> None:
    sequence = make([1], allowed_token_ids=[4], stop=(4,), min_tokens=1)
    assert Sampler(CPU).sample(torch.zeros(1, 128), [sequence]).token_ids == [EMPTY]


def test_bad_sequences_count_what_was_generated_alone() -> None:
    sampler, logits = Sampler(CPU), torch.zeros(1, 64)
    logits[0, 3], logits[0, 2] = 2.0, 1.0
    sequence, tokens = make([3, 3], bad_token_sequences=[[3, 3, 3], [2, 3]]), []
    for _ in range(5):
        tokens += sampler.sample(logits.clone(), [sequence]).token_ids
        sequence.token_ids.append(tokens[-1])
    assert tokens == [3, 3, 2, 2, 2]


VOCABULARY = 100_000
LAST = VOCABULARY - 1
MANY: dict[str, tuple[dict[str, Any], int]] = {
    "held back": ({"stop": tuple(range(LAST)), "min_tokens": 50}, LAST),
    "runs with one last but one": ({"bad_token_sequences": tuple((token, 7, 0) for token in range(VOCABULARY))}, 1),
    "runs with one beginning": ({"bad_token_sequences": tuple((7, token) for token in range(LAST))}, LAST),
    "allowed": ({"allowed_token_ids": tuple(range(LAST, 0, -1))}, 1),
    "biased": ({"logit_bias": tuple((token, float(token == 3)) for token in range(VOCABULARY))}, 3),
}


@pytest.mark.parametrize(("params", "expected"), MANY.values(), ids=list(MANY))
def test_a_step_is_short_however_many_tokens_a_request_names(params: dict[str, Any], expected: int) -> None:
    """Python code for each token took more than a second for 16 sequences of most of these."""
    first = make([1, 2], vocab=VOCABULARY, **params)
    sequences = [copy_of(first) for _ in range(16)]
    for sequence in sequences:
        sequence.token_ids.extend([5, 7])
    logits, sampler = torch.zeros(16, VOCABULARY), Sampler(CPU)
    began = time.thread_time()
    assert sampler.sample(logits, sequences).token_ids == [expected] * 16
    assert time.thread_time() - began < 0.5


def test_token_ids_stay_appendable_after_sampling() -> None:
    sequence = make([1, 2], repetition_penalty=1.5)
    Sampler(CPU).sample(torch.randn(1, 64), [sequence])
    sequence.token_ids.append(3)
    assert sequence.token_ids == array("i", [1, 2, 3])
