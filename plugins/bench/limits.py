"""What can't be exceeded: waking consumers without any transport, and a transport's own library without anything around it."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from tllm_core.contracts.messages import Plain
from tllm_core.errors import ConfigError

RAW_BYTES = 32 << 20
"""At most so much is sent one way: a broker holds all of it while the receiver lags behind."""

# ----------------------------------------------------------------------------------------------------- waking


async def async_wakes_per_s(streams: int, steps: int) -> float:
    """Futures set and awaited per second: a loop sets one per stream and step, and each stream's task awaits its own."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(streams)]

    async def consume(stream: int) -> int:
        total = 0
        for _ in range(steps):
            total += await futures[stream]
            futures[stream] = loop.create_future()
        return total

    tasks = [asyncio.create_task(consume(stream)) for stream in range(streams)]
    await asyncio.sleep(0)
    started = time.perf_counter()
    for _ in range(steps):
        for future in futures:
            future.set_result(1)
        await asyncio.sleep(0)
    totals = await asyncio.gather(*tasks)
    return sum(totals) / (time.perf_counter() - started)


def sync_wakes_per_s(streams: int, steps: int) -> float:
    """Locks released and acquired per second: a thread releases one per stream and step, and one thread acquires them in turn."""
    locks = [threading.Lock() for _ in range(streams)]
    for lock in locks:
        lock.acquire()
    rounds = threading.Semaphore(1)

    def produce() -> None:
        for _ in range(steps):
            rounds.acquire()
            for lock in locks:
                lock.release()

    thread = threading.Thread(target=produce)
    started = time.perf_counter()
    thread.start()
    for _ in range(steps):
        for lock in locks:
            lock.acquire()
        rounds.release()
    elapsed = time.perf_counter() - started
    thread.join()
    return streams * steps / elapsed


# ---------------------------------------------------------------------------------------------------- libraries


class Raw(Struct, frozen=True):
    """Frames of `frame_bytes` one way per second, and the round trips of short ones. library: what they were sent with."""

    library: str
    messages_per_s: float
    frame_bytes: int
    round_trips_s: list[float]


LIBRARIES: dict[str, tuple[str, str]] = {
    "nats": ("nats", "nats-py"),
    "redis": ("redis", "redis-py"),
    "zmq": ("zmq", "pyzmq"),
}
"""A transport's name -> the module that measures its library here (raw_NAME), and the library's own name."""
OTHERS = "zmq"
"""What a transport without a library of its own is compared with."""

Measure = Callable[[Mapping[str, Plain], int, int], tuple[float, list[float]]]


def raw(library: str, options: Mapping[str, Plain], frame_bytes: int, messages: int) -> Raw:
    """Measures with a process of its own at the other end. options: the transport's, for where its broker is.

    Raises ConfigError where the library is not installed.
    """
    name = library if library in LIBRARIES else OTHERS
    module, shown = LIBRARIES[name]
    try:
        measure: Measure = importlib.import_module(f"tllm_core.plugins.bench.raw_{module}").measure
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'tllm-core[{name}]'") from None
    count = max(1, min(messages, RAW_BYTES // frame_bytes))
    messages_per_s, round_trips_s = measure(options, frame_bytes, count)
    return Raw(shown, messages_per_s, frame_bytes, round_trips_s)
