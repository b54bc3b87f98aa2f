"""How fast a crowd hears of a death: 256 streams on threads and a loop, and submits that race with it."""

import asyncio
import os
import signal
import statistics
import threading
import time

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds, until
from tllm_core import EngineDeadError, GenerationExecutor
from tllm_core.engines.echo import expected_tokens

SYNC, ASYNC, RACERS = 48, 208, 4
WAKE_UP_S = 2.0
"""Promised is a twentieth of it; what it took is printed."""


class Streams:
    """Consumers on threads and on one event loop. `woken`: how and when each ended."""

    def __init__(self, executor: GenerationExecutor) -> None:
        self.executor = executor
        self.results = [executor.generate_async([i + 1, 7], LONG) for i in range(SYNC + ASYNC)]
        self.tokens: list[list[int]] = [[] for _ in self.results]
        self.woken: list[tuple[EngineDeadError, float]] = []
        self._threads = [threading.Thread(target=self._sync, args=(i,)) for i in range(SYNC)]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._all_async())))
        for thread in self._threads:
            thread.start()
        until(lambda: all(self.tokens), "every stream has begun")

    def _sync(self, i: int) -> None:
        try:
            for result in self.results[i]:
                self.tokens[i] += result.outputs[0].token_ids_diff
        except EngineDeadError as error:
            self.woken.append((error, time.monotonic()))

    async def _async(self, i: int) -> None:
        try:
            async for result in self.results[i]:
                self.tokens[i] += result.outputs[0].token_ids_diff
        except EngineDeadError as error:
            self.woken.append((error, time.monotonic()))

    async def _all_async(self) -> None:
        await asyncio.gather(*(self._async(i) for i in range(SYNC, SYNC + ASYNC)))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def check(self, words: str, since: float) -> None:
        assert len(self.woken) == SYNC + ASYNC
        assert {words in str(error.root_cause) for error, _ in self.woken} == {True}
        for i, tokens in enumerate(self.tokens):
            assert tokens == self.results[i].outputs[0].token_ids == expected_tokens([i + 1, 7], len(tokens))
        took_ms = sorted((at - since) * 1000 for _, at in self.woken)
        print(f"woken after ms: p50 {statistics.median(took_ms):.1f}, max {took_ms[-1]:.1f}")
        assert took_ms[-1] < WAKE_UP_S * 1000


def race(executor: GenerationExecutor, errors: list[EngineDeadError]) -> None:
    """Submits and waits until it is told of the death."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            executor.generate_async([3], LONG).result(0.005)
        except TimeoutError:
            continue
        except EngineDeadError as error:
            errors.append(error)
            return


def test_256_streams_and_racing_submits_all_hear_of_a_sigkill(spawned: Worlds) -> None:
    executor = spawned(**SLOW)
    streams, errors = Streams(executor), []
    racers = [threading.Thread(target=race, args=(executor, errors)) for _ in range(RACERS)]
    for racer in racers:
        racer.start()
    since = time.monotonic()
    os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
    streams.join()
    for racer in racers:
        racer.join(DEADLINE_S)
    streams.check("engine rank 0 was killed by SIGKILL", since)
    assert ["SIGKILL" in str(error) for error in errors] == [True] * RACERS
    assert streams.woken[0][0].root_cause.exitcode == -signal.SIGKILL
    assert executor.health().in_flight == 0
