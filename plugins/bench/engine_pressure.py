"""`tllm bench engine --under-pressure`: what running streams notice of long prompts, of requests that are slow or broken, of
the prefix cache, and of a second rank.

Engines are started as a caller starts them, in processes of their own, and times are the caller's. All figures are ratios, and
what is compared is measured in turn in every round.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, field

from tllm_core.executor import GenerationExecutor
from tllm_core.plugins.bench.engine_hardships import HARDSHIPS, Hardship, Trial, attempt
from tllm_core.plugins.bench.engine_streams import World, at_once, typical_gap_s


class Plan(Struct, frozen=True):
    """What is measured. streams: sequences that decode beside whatever happens. chunk_tokens: of a step at most; the long
    prompt has `chunks` times as many. window_tokens: of each request beside streams. say: hears of the progress."""

    model: str
    dtype: str
    device: str
    attention: str
    threads: int
    streams: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    say: Callable[[str], None]
    chunk_tokens: int = 512
    chunks: int = 4
    prefix_tokens: int = 512
    window_tokens: int = 24

    @property
    def most_tokens(self) -> int:
        """Of the longest sequence, with as much to spare."""
        streams = self.prompt_tokens + 8 * self.window_tokens + self.new_tokens
        return 2 * max(self.chunk_tokens * self.chunks, self.prefix_tokens, streams)


class Chunks(Struct, frozen=True):
    """A long prompt alone and beside streams. own_s: of a step with a chunk and nothing else, on average. gaps_s: between
    the streams' tokens while it was computed. step_s: of a step with a chunk, beside the streams; decode_s: without."""

    own_s: float
    gaps_s: list[float]
    step_s: float
    decode_s: float


class Round(Struct):
    """What was measured in one round. rates: decoded tokens per second of each world. first_s: to the first token of a
    prompt, and of the same once more."""

    chunks: Chunks
    rates: dict[str, float]
    first_s: tuple[float, float]
    trials: dict[str, Trial] = field(default_factory=dict)


class Found(Struct):
    """All rounds, and what could not be measured, with the reason."""

    rounds: list[Round] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def measure(plan: Plan) -> Found:
    """Raises ConfigError for a model that can't be used, or has no room for these prompts, and on a machine so busy that no
    pace can be told."""
    return asyncio.run(_measure(plan))


async def _measure(plan: Plan) -> Found:
    found = Found()
    with contextlib.ExitStack() as stack:
        worlds = {}
        for name, options in _worlds(plan, found.left_out):
            plan.say(f"starting: {name}")
            worlds[name] = _start(plan, stack, **options)
        supports = worlds[ONE].executor.info.supports
        hardships = [each for each in HARDSHIPS if not each.guided or "guided" in supports]
        if len(hardships) < len(HARDSHIPS):
            found.left_out["guided requests"] = "the engine has no guided decoding for this model"
        for number in range(plan.rounds):
            found.rounds.append(await _round(plan, worlds, hardships, number))
    plan.say("")
    return found


ONE, UNCACHED, TWO = "one rank", "no prefix cache", "two ranks"


def _worlds(plan: Plan, left_out: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield ONE, {"threads": plan.threads}
    yield UNCACHED, {"threads": plan.threads, "enable_prefix_cache": False}
    if plan.device != "cpu":
        left_out[TWO] = "they would share one device"
    elif plan.threads % 2:
        left_out[TWO] = f"{plan.threads} threads can't be divided among them"
    else:
        yield TWO, {"threads": plan.threads // 2, "tensor_parallel_size": 2, "comm": "shm"}


def _start(plan: Plan, stack: contextlib.ExitStack, **options: Any) -> World:
    common = {
        "model": plan.model,
        "dtype": plan.dtype,
        "device": plan.device,
        "attention": plan.attention,
        "max_batched_tokens": plan.chunk_tokens,
        "max_num_seqs": min(plan.chunk_tokens, max(64, plan.streams + 1)),
    }
    executor = stack.enter_context(GenerationExecutor.create(engine="tp", engine_options={**common, **options}))
    return World(executor, plan.most_tokens, seed=1)


async def _round(plan: Plan, worlds: dict[str, World], hardships: list[Hardship], number: int) -> Round:
    backwards = number % 2 == 1
    world = worlds[ONE]
    plan.say(f"round {number + 1}/{plan.rounds}: decode")
    rates = {}
    for name in sorted(worlds, key=list(worlds).index, reverse=backwards):
        rates[name] = await worlds[name].decode(plan.streams, plan.prompt_tokens, plan.new_tokens)
    plan.say(f"round {number + 1}/{plan.rounds}: prompts")
    prompt = world.prompt(plan.prefix_tokens)
    first_s = (await world.first_token_s(prompt), await world.first_token_s(prompt))
    found = Round(await _chunks(plan, world), rates, first_s)
    for hardship in hardships:
        plan.say(f"round {number + 1}/{plan.rounds}: {hardship.name}")
        found.trials[hardship.name] = await _try(plan, world, hardship, backwards)
    return found


async def _chunks(plan: Plan, world: World) -> Chunks:
    length = plan.chunk_tokens * plan.chunks
    own_s = await world.first_token_s(world.prompt(length)) / plan.chunks
    async with world.streams(plan.streams, plan.prompt_tokens) as streams:
        begin = streams[0].times[-1]
        for stream in streams:
            await stream.more(plan.window_tokens)
        long = world.ask(world.prompt(length), max_tokens=1)
        await long.reach(1)
        for stream in streams:
            await stream.more(1)
    decode_s = typical_gap_s(streams, begin, long.asked_at)
    if decode_s is None:
        raise at_once(plan.window_tokens, "run it where")
    gaps = [gap for stream in streams for gap in stream.gaps(long.asked_at, long.times[0])]
    steps = -(-length // (plan.chunk_tokens - plan.streams))
    return Chunks(own_s, gaps, (long.times[0] - long.asked_at) / steps, decode_s)


async def _try(plan: Plan, world: World, hardship: Hardship, plain_first: bool) -> Trial:
    tokens = plan.window_tokens
    alone, plain_alone = await attempt(world, hardship, [], tokens, plain_first)
    async with world.streams(plan.streams, plan.prompt_tokens) as streams:
        beside, plain_beside = await attempt(world, hardship, streams, tokens, plain_first)
    return Trial(alone, plain_alone, beside, plain_beside)
