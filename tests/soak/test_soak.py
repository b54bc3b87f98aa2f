"""Many requests of every outcome: afterwards all tables are empty, memory is flat and nothing is left.

`TLLM_SOAK_REQUESTS` sets how many: 6,000 by default, 100,000 in `make soak`; half as many over each broker.
"""

import asyncio
import contextlib
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.idle_engines import TRANSPORTS
from tllm_core import GenerationExecutor, RequestError, SamplingParams
from tllm_core.conformance.broker import BrokerProcess, nats_server, valkey_server
from tllm_core.engines.echo import expected_tokens

BROKERS: dict[str, Callable[[], BrokerProcess]] = {"nats": nats_server, "redis": valkey_server}
REQUESTS = int(os.environ.get("TLLM_SOAK_REQUESTS", "6000"))
AT_ONCE = 100
WARM_UP = 3_000
"""Until then caches of bounded size fill."""
POISON = 31_000
FAULTS = [{"at": "step", "do": "request_error", "token": POISON, "message": "poison"}]
GROWTH_BYTES = 12 << 20
"""What may come after that: allocators round up; a leak of 200 bytes per request would be 16 MB at 100,000."""


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(condition: Callable[[], bool], what: str) -> None:
    tick = threading.Event()
    for _ in range(3_000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError(f"never came true: {what}")


class Mix:
    """Requests of every outcome, at random; counts how they ended."""

    def __init__(self, executor: GenerationExecutor, seed: int) -> None:
        self.executor = executor
        self.random = random.Random(seed)
        self.ended: Counter[str] = Counter()

    async def batch(self, count: int) -> None:
        cases = [
            self.finished,
            self.streamed,
            self.aborted,
            self.timed_out,
            self.failed,
            self.refused,
            self.dropped,
            self.many,
        ]
        await asyncio.gather(*(self.random.choice(cases)() for _ in range(count)))

    def prompt(self) -> list[int]:
        return [self.random.randrange(30_000) for _ in range(self.random.randint(1, 40))]

    async def finished(self) -> None:
        prompt = self.prompt()
        result = await self.executor.generate_async(prompt, SamplingParams(max_tokens=5), streaming=False)
        assert result.outputs[0].token_ids == expected_tokens(prompt, 5)
        self.ended["finished"] += 1

    async def streamed(self) -> None:
        prompt, tokens = self.prompt(), []
        async for result in self.executor.generate_async(prompt, SamplingParams(max_tokens=12, logprobs=2)):
            tokens += result.outputs[0].token_ids_diff
        assert tokens == expected_tokens(prompt, 12)
        self.ended["streamed"] += 1

    async def aborted(self) -> None:
        result = self.executor.generate_async(self.prompt(), SamplingParams(max_tokens=4000))
        if self.random.random() < 0.5:
            await anext(result)
        result.abort()
        assert (await result).outputs[0].finish_reason == "abort"
        self.ended["aborted"] += 1

    async def timed_out(self) -> None:
        result = await self.executor.generate_async(self.prompt(), SamplingParams(max_tokens=4000), timeout_s=0.02)
        self.ended[str(result.outputs[0].finish_reason)] += 1

    async def failed(self) -> None:
        with pytest.raises(RequestError, match="poison"):
            await self.executor.generate_async([POISON, *self.prompt()], SamplingParams(max_tokens=5))
        self.ended["failed"] += 1

    async def refused(self) -> None:
        with pytest.raises(RequestError):
            self.executor.generate_async([], SamplingParams(max_tokens=5))
        self.ended["refused"] += 1

    async def dropped(self) -> None:
        result = self.executor.generate_async(self.prompt(), SamplingParams(max_tokens=4000))
        if self.random.random() < 0.5:
            await anext(result)
        self.ended["dropped"] += 1

    async def many(self) -> None:
        result = await self.executor.generate_async(self.prompt(), SamplingParams(max_tokens=3, n=3))
        assert [output.length for output in result.outputs] == [3, 3, 3]
        self.ended["many"] += 1


def memory(*pids: int) -> list[int]:
    gc.collect()
    return [rss_bytes(pid) for pid in (os.getpid(), *pids)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_outcome_leaves_nothing_behind(transport: str) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    requests = REQUESTS // 2 if transport in BROKERS else REQUESTS
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(BROKERS[transport]()) if transport in BROKERS else None
        executor = stack.enter_context(
            GenerationExecutor.create(
                engine="echo",
                engine_options={"faults": FAULTS},
                transport=TRANSPORTS[transport],
                transport_options={} if broker is None else {"url": broker.url},
            )
        )
        engine = executor.health().ranks[0].pid
        watched = [engine] if broker is None else [engine, broker.pid]
        mix, early, warm_up = Mix(executor, seed=1), [0], max(requests // 5, min(WARM_UP, requests // 2))
        for done in range(0, requests, AT_ONCE):
            asyncio.run(mix.batch(AT_ONCE))
            if early == [0] and done >= warm_up:
                early = memory(*watched)
        until(lambda: executor.health().in_flight == 0, "no request is open")
        until(lambda: executor.stats().running == 0, "the engine runs nothing")
        worker = executor.stats().extra["worker"]
        assert worker["requests"] == 0, worker
        until(executor._frontend.link.idle, "everything is acknowledged")
        assert len(executor._frontend.ledger) == 0
        assert not executor._frontend.ledger.dropped
        late = memory(*watched)
        print(f"{transport}: {sum(mix.ended.values())} requests: {dict(mix.ended)}; RSS {early} -> {late}")
        assert min(mix.ended.values()) > 0
        grown = [after - before for before, after in zip(early, late, strict=True)]
        assert max(grown) < GROWTH_BYTES, grown
    until(lambda: threading.active_count() <= threads, "threads are gone")
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "file descriptors are closed")
    assert not Path(f"/proc/{engine}").exists()
