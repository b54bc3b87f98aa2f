"""Requests to an engine in processes of its own, and when each of their tokens reached the caller."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import ConfigError, RequestError
from tllm_core.executor import GenerationExecutor
from tllm_core.ledger.result import GenerationResult

ATTEMPTS = 3
"""How often something is measured whose tokens came all at once, because the benchmark had no core while they were made."""


class Prompts:
    """Random token ids, never the same prompt twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random, self._vocab_size = random.Random(seed), vocab_size

    def take(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]


def shared_window(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while every sequence is decoding: from the last first token to the first last one."""
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    tokens = sum(sum(start < moment <= end for moment in t) for t in times)
    return tokens / (end - start) if end > start else 0.0


def at_once(tokens: int, advice: str) -> ConfigError:
    return ConfigError(
        f"{tokens} tokens reached the benchmark all at once, {ATTEMPTS} times in a row, so that no pace can be told: "
        f"{advice} fewer programs want the cores"
    )


class Stream:
    """One request, read by a task of its own. times: when each token came. error: why the engine gave it up, if it did."""

    def __init__(self, result: GenerationResult) -> None:
        self.times: list[float] = []
        self.error: str | None = None
        self.asked_at = time.perf_counter()
        self._ended_at: float | None = None
        self._result = result
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def reach(self, tokens: int) -> None:
        """Until so many have come. Raises ConfigError where it ends before."""
        while len(self.times) < tokens and not self._task.done():
            self._news.clear()
            await self._news.wait()
        if len(self.times) < tokens:
            await self._task
            raise ConfigError(
                f"a stream of the benchmark ended after {len(self.times)} tokens: {self.error or 'no room'}"
            )

    async def more(self, tokens: int) -> None:
        """Until so many more have come."""
        await self.reach(len(self.times) + tokens)

    async def ended(self) -> float:
        """When it ended, however it did."""
        await self._task
        assert self._ended_at is not None
        return self._ended_at

    async def end(self) -> None:
        self._result.abort()
        await self._task

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between its tokens, of those gaps that lie between these two moments, if only partly."""
        return [after - before for before, after in pairwise(self.times) if before < end and after > begin]

    async def _read(self) -> None:
        try:
            async for update in self._result:
                self.times += [time.perf_counter()] * len(update.outputs[0].token_ids_diff)
                self._news.set()
        except RequestError as error:
            self.error = str(error)
        finally:
            self._ended_at = time.perf_counter()
            self._news.set()


class World:
    """A running engine, and prompts that it has never seen."""

    def __init__(self, executor: GenerationExecutor, needed_tokens: int, seed: int) -> None:
        """needed_tokens: of the longest sequence. Raises ConfigError where the model allows no such one."""
        vocab, limit = executor.info.vocab_size, executor.info.max_seq_len
        if vocab is None:
            raise ConfigError("the engine does not say how many tokens its model knows")
        if limit is not None and limit < needed_tokens:
            raise ConfigError(f"sequences of {needed_tokens} tokens are measured, and the model's limit is {limit}")
        self.executor, self.vocab_size = executor, vocab
        self._prompts = Prompts(vocab, seed)

    def prompt(self, length: int) -> list[int]:
        return self._prompts.take(1, length)[0]

    def ask(self, prompt: list[int], **sampling: Any) -> Stream:
        """Sampling is greedy, and does not end where the model would."""
        return Stream(self.executor.generate_async(prompt, SamplingParams(**{"ignore_eos": True, **sampling})))

    async def first_token_s(self, prompt: list[int]) -> float:
        """How long a request waits for it while nothing else runs."""
        stream = self.ask(prompt, max_tokens=1)
        await stream.reach(1)
        return stream.times[0] - stream.asked_at

    async def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        """Tokens per second while the whole batch decodes. Raises ConfigError where the tokens come all at once."""
        for _ in range(ATTEMPTS):
            streams = [self.ask(self.prompt(prompt_tokens), max_tokens=new_tokens) for _ in range(batch)]
            for stream in streams:
                await stream.reach(new_tokens)
            if rate := shared_window([stream.times for stream in streams]):
                return rate
        raise at_once(new_tokens, "give more with --new-tokens, or run it where")

    @asynccontextmanager
    async def streams(self, count: int, prompt_tokens: int) -> AsyncIterator[list[Stream]]:
        """So many that decode, and are aborted at the end."""
        streams = [self.ask(self.prompt(prompt_tokens)) for _ in range(count)]
        try:
            for stream in streams:
                await stream.reach(2)
            yield streams
        finally:
            for stream in streams:
                await stream.end()


def typical_gap_s(streams: Sequence[Stream], begin: float, end: float) -> float | None:
    """The median of seconds per token; all streams share the engine's steps. Tokens that the caller got at once share the
    time since those before. None where no two came apart."""
    shares: list[float] = []
    for stream in streams:
        moments = sorted(Counter(stream.times).items())
        for (before, _), (after, count) in pairwise(moments):
            if before < end and after > begin:
                shares += [(after - before) / count] * count
    return median(shares) if shares else None
