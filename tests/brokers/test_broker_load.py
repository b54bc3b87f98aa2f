"""A frontend that hardly reads costs nobody else their pace, and nobody memory."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attach.conftest import AttachedProcess
from tests.brokers.conftest import LONG, Setup
from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.engines.echo import expected_tokens

MIB = 1 << 20
AWAKE_S, ASLEEP_S = 0.05, 0.95
"""A frontend that gets to read once a second."""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def dozing(process: AttachedProcess) -> Iterator[None]:
    """Lets a process run a little once a second."""
    over = threading.Event()

    def doze() -> None:
        while not over.wait(AWAKE_S):
            os.kill(process.pid, signal.SIGSTOP)
            over.wait(ASLEEP_S)
            os.kill(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=doze)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def seconds_for(executor: GenerationExecutor, count: int) -> float:
    results = [executor.generate_async([number, 6], SamplingParams(max_tokens=count)) for number in range(16)]
    began = time.monotonic()
    for number, result in enumerate(results):
        assert result.result(120).outputs[0].token_ids == expected_tokens([number, 6], count)
    return time.monotonic() - began


def test_a_slow_frontend_costs_a_fast_one_nothing_and_memory_stays_bounded(broker: Setup) -> None:
    owned = broker.shared(step_interval_s=0.005, max_batch_size=512)
    fast = broker.attach(owned)
    alone_s = seconds_for(fast, 300)
    slow = broker.attach_process(owned, 1, LONG)
    slow.until("tokens")
    pids = (owned.rank0.pid, broker.server.pid)
    before = [resident_bytes(pid) for pid in pids]
    with dozing(slow):
        beside_s = seconds_for(fast, 300)
        grown = [resident_bytes(pid) - size for pid, size in zip(pids, before, strict=True)]
    print(f"{alone_s / beside_s:.2f} of its pace alone; engine and broker grew by {[size / MIB for size in grown]} MiB")
    assert alone_s / beside_s > 0.5  # what is promised is 0.9, and measured by the benchmark
    assert max(grown) < 64 * MIB
    slow.until("tokens")
    assert slow.is_exact()
