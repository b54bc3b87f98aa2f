"""Requests and their consumers: what is measured of the boundary."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from msgspec import Struct

from tllm_core.contracts.messages import SamplingParams, StepBatch, TokenIds
from tllm_core.errors import Overloaded
from tllm_core.executor import GenerationExecutor
from tllm_core.ledger.result import GenerationResult
from tllm_core.registry import load_object
from tllm_core.wire.codec import encode
from tllm_core.wire.header import SEALED_SIZE, payload_size

PROMPT_TOKENS = 8
VOCAB_SIZE = 32000
RETRY_S = 0.001

Expected = Callable[..., list[int]]


def expected_tokens(prompt: TokenIds, count: int) -> list[int]:
    """What the echo engine answers with. Named instead of imported, as plugins know no engine."""
    expected: Expected = load_object("tllm_core.engines.echo.tokens:expected_tokens")
    return expected(prompt, count, vocab_size=VOCAB_SIZE)


class Workload(Struct, frozen=True):
    """One request per stream, all different, and the tokens that each must get."""

    prompts: list[TokenIds]
    expected: list[list[int]]
    steps: int
    vocab_size: int = VOCAB_SIZE

    @classmethod
    def of(cls, streams: int, steps: int) -> Self:
        prompts = [
            TokenIds.of([(stream * 31 + at * 7 + stream // VOCAB_SIZE) % VOCAB_SIZE for at in range(PROMPT_TOKENS)])
            for stream in range(streams)
        ]
        return cls(prompts, [expected_tokens(prompt, steps) for prompt in prompts], steps)

    def longest(self) -> int:
        """Tokens of a whole sequence, also of those that measure the latency."""
        return PROMPT_TOKENS + max(self.steps, 4096)

    def frame_bytes(self) -> int:
        """Bytes of the frame that carries one step of all streams."""
        token_ids = [tokens[0] for tokens in self.expected]
        _, payload = encode(StepBatch(client_ids=list(range(len(token_ids))), token_ids=token_ids))
        return payload_size(payload) + SEALED_SIZE


class Delivery(Struct, frozen=True):
    """What the consumers of one workload got, in how many updates, and how long it took."""

    seconds: float
    streams: int
    tokens: int
    updates: int
    exact: bool

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @classmethod
    def of(cls, seconds: float, got: Sequence[list[int]], updates: int, work: Workload) -> Self:
        return cls(seconds, len(got), sum(map(len, got)), updates, list(got) == work.expected)


class Latency(Struct):
    """Of single streams, one after the other, in seconds: submit to first token, and between tokens.

    Tokens that came in one update share the time since the last one.
    """

    exact: bool = True
    first_s: list[float] = []
    between_s: list[float] = []

    def add(self, started: float, updates: Sequence[tuple[float, int]]) -> None:
        """`updates` of one request: (when, tokens in it)."""
        last = updates[0][0]
        self.first_s.append(last - started)
        for when, tokens in updates[1:]:
            self.between_s += [(when - last) / tokens] * tokens
            last = when


class Consumers(ABC):
    """How results are read."""

    @abstractmethod
    def deliver(self, executor: GenerationExecutor, work: Workload, *, paused: bool) -> Delivery:
        """Submits all and reads all. The clock runs from the first submit on; `paused`: the engine holds back until all are
        submitted, and the clock runs from its release on."""

    @abstractmethod
    def latency(self, executor: GenerationExecutor, requests: int, tokens: int) -> Latency:
        """Reads single streams of so many tokens, one after the other."""


class AsyncConsumers(Consumers):
    """One task per stream, all on one event loop."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    def deliver(self, executor: GenerationExecutor, work: Workload, *, paused: bool) -> Delivery:
        return self._runner.run(self._deliver(executor, work, paused))

    async def _deliver(self, executor: GenerationExecutor, work: Workload, paused: bool) -> Delivery:
        params = _params(work.steps)
        got: list[list[int]] = [[] for _ in work.prompts]
        if paused:
            await executor.acontrol("pause")
        started = time.perf_counter()
        tasks = []
        for prompt, tokens in zip(work.prompts, got, strict=True):
            result = await _submit(executor, prompt, params)
            tasks.append(asyncio.create_task(_consume(result, tokens)))
        if paused:
            await asyncio.sleep(0)
            started = time.perf_counter()
            await executor.acontrol("resume")
        updates = await asyncio.gather(*tasks)
        return Delivery.of(time.perf_counter() - started, got, sum(updates), work)

    def latency(self, executor: GenerationExecutor, requests: int, tokens: int) -> Latency:
        return self._runner.run(self._latency(executor, requests, tokens))

    async def _latency(self, executor: GenerationExecutor, requests: int, tokens: int) -> Latency:
        latency, prompt, params = Latency(), TokenIds.of(range(PROMPT_TOKENS)), _params(tokens)
        expected = expected_tokens(prompt, tokens)
        for _ in range(requests):
            started = time.perf_counter()
            result = executor.generate_async(prompt, params, streaming=True)
            updates = [(time.perf_counter(), len(update.outputs[0].token_ids_diff)) async for update in result]
            latency.add(started, updates)
            latency.exact &= result.outputs[0].token_ids == expected
        return latency


async def _submit(executor: GenerationExecutor, prompt: TokenIds, params: SamplingParams) -> GenerationResult:
    while True:
        try:
            return executor.generate_async(prompt, params, streaming=True)
        except Overloaded:
            await asyncio.sleep(RETRY_S)


async def _consume(result: GenerationResult, tokens: list[int]) -> int:
    updates = 0
    async for update in result:
        tokens += update.outputs[0].token_ids_diff
        updates += 1
    return updates


class SyncConsumers(Consumers):
    """One thread that visits the streams in turn and takes each one's next update."""

    def deliver(self, executor: GenerationExecutor, work: Workload, *, paused: bool) -> Delivery:
        params = _params(work.steps)
        got: list[list[int]] = [[] for _ in work.prompts]
        if paused:
            executor.control("pause")
        started = time.perf_counter()
        results = [_submit_sync(executor, prompt, params) for prompt in work.prompts]
        if paused:
            started = time.perf_counter()
            executor.control("resume")
        updates = _visit(results, got)
        return Delivery.of(time.perf_counter() - started, got, updates, work)

    def latency(self, executor: GenerationExecutor, requests: int, tokens: int) -> Latency:
        latency, prompt, params = Latency(), TokenIds.of(range(PROMPT_TOKENS)), _params(tokens)
        expected = expected_tokens(prompt, tokens)
        for _ in range(requests):
            started = time.perf_counter()
            result = executor.generate_async(prompt, params, streaming=True)
            updates = [(time.perf_counter(), len(update.outputs[0].token_ids_diff)) for update in result]
            latency.add(started, updates)
            latency.exact &= result.outputs[0].token_ids == expected
        return latency


def _submit_sync(executor: GenerationExecutor, prompt: TokenIds, params: SamplingParams) -> GenerationResult:
    while True:
        try:
            return executor.generate_async(prompt, params, streaming=True)
        except Overloaded:
            time.sleep(RETRY_S)


def _visit(results: Sequence[GenerationResult], got: Sequence[list[int]]) -> int:
    updates = 0
    streams = list(zip(map(iter, results), got, strict=True))
    while streams:
        going = []
        for stream in streams:
            update = next(stream[0], None)
            if update is not None:
                stream[1].extend(update.outputs[0].token_ids_diff)
                updates += 1
                going.append(stream)
        streams = going
    return updates


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)
