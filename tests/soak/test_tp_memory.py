"""Random requests to a tp engine with a cache of few blocks: its memory is flat, and nothing is owned in the end.

`TLLM_SOAK_ENGINE_REQUESTS` sets how many: 1,500 by default, 10,000 in `make soak`.
"""

import gc
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.soak.test_soak import rss_bytes
from tests.tp.conftest import VOCAB, save_tiny_llama
from tests.tp.test_tp_engine import Bench
from tllm_core.contracts.messages import IterationStats

REQUESTS = int(os.environ.get("TLLM_SOAK_ENGINE_REQUESTS", "1500"))
WARM_UP = 500
"""Until then the cache, its prompt logprobs and the log of its events fill, all of which are bounded."""
EVENTS = 200
GROWTH_BYTES = 12 << 20
"""What may come after that: allocators round up. A sequence's tokens and hashes, kept, would be 2 KB per request."""
BLOCKS_PER_REQUEST = 0.5
"""Of Python's allocator: less than one object that is kept per request."""


class Traffic:
    """Requests of every kind, a third of them behind one of a few beginnings; some are aborted."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.random = bench, random.Random(3)
        self.beginnings = [self.tokens(48) for _ in range(4)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, VOCAB) for _ in range(count)]

    def run(self, requests: int) -> None:
        """So many, at most ten at once, to their ends; what was received is forgotten."""
        bench, pick = self.bench, self.random
        for _ in range(requests):
            self.submit()
            if pick.random() < 0.15:
                bench.abort(pick.choice(list(bench.open)))
            while len(bench.open) > 10:
                bench.step()
        bench.drain()
        bench.received.clear()

    def submit(self) -> None:
        pick = self.random
        beginning = pick.choice(self.beginnings) if pick.random() < 0.3 else []
        self.bench.submit(
            beginning + self.tokens(pick.randint(1, 40)),
            n=pick.choice([1, 1, 1, 2, 3]),
            max_tokens=pick.randint(1, 16),
            temperature=pick.choice([0.0, 1.0]),
            priority=pick.choice([0, 0, 1]),
            logprobs=pick.choice([None, None, 2]),
            prompt_logprobs=pick.choice([None, None, None, 1]),
            cache_salt=pick.choice([None, None, "salt"]),
            repetition_penalty=pick.choice([1.0, 1.0, 1.1]),
        )


class Seen(NamedTuple):
    """From the end of the warm-up on: blocks of Python's allocator and bytes of memory more; and the engine's counts."""

    objects: int
    resident_bytes: int
    stats: IterationStats
    errors: dict[int, str]


@pytest.mark.timeout(1800)
def test_memory_is_flat_over_many_requests(tmp_path: Path) -> None:
    """In a process of its own: what others freed in this one would hide a growth, and what they left would look like one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        seen = pool.submit(measure, tmp_path).result()
    assert seen.objects < BLOCKS_PER_REQUEST * (REQUESTS - WARM_UP), f"{seen.objects} objects more"
    assert seen.resident_bytes < GROWTH_BYTES
    assert seen.stats.preemptions > 0
    assert seen.stats.cached_tokens > 0
    assert not seen.errors


def measure(directory: Path) -> Seen:
    bench = Bench(
        save_tiny_llama(directory),
        block_size=8,
        num_blocks=24,
        max_num_seqs=8,
        max_batched_tokens=48,
        kv_events=EVENTS,
    )
    traffic = Traffic(bench)
    traffic.run(WARM_UP)
    before, resident = objects(), rss_bytes(os.getpid())
    traffic.run(REQUESTS - WARM_UP)
    grown = objects() - before
    return Seen(grown, rss_bytes(os.getpid()) - resident, bench.check_empty(), bench.errors)


def objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()
