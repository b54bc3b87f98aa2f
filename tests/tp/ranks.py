"""All ranks of a model in this process, a thread each, which meet at barriers."""

import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tllm_core.contracts.interfaces import EngineContext
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.comm import Alone, Group
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.spec import TpSettings

T = TypeVar("T")
MEET_S = 60.0


class Meeting:
    """Where ranks put what they have, and take what all have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=MEET_S)
        self.table: list[Any] = [None] * size

    def exchange(self, rank: int, mine: Any, use: Callable[[list[Any]], T]) -> T:
        """`use` of all that was put there; what a rank put there stays as it is until all are done."""
        self.table[rank] = mine
        self.barrier.wait()
        try:
            return use(list(self.table))
        finally:
            self.barrier.wait()


class ThreadGroup(Group):
    """Counts its calls: what all ranks have to do alike."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.barrier.parties, meeting
        self.calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, _sum)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        return self._exchange(x, lambda parts: torch.cat(parts, dim=1) if self.rank == 0 else None)

    def broadcast(self, values: "array[int] | None") -> "array[int]":
        return self._exchange(values, lambda parts: array("i", parts[0]))

    def close(self) -> None: ...

    def _exchange(self, mine: Any, use: Callable[[list[Any]], T]) -> T:
        self.calls += 1
        return self._meeting.exchange(self.rank, mine, use)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        assert part.shape == total.shape, "ranks sum different shapes"
        total += part
    return total


class Ranks:
    """The runners of one model. A context manager: its threads end with it."""

    def __init__(self, directory: Path, size: int, **settings: Any) -> None:
        meeting = Meeting(size)
        asked = TpSettings(**{"model": str(directory), "num_blocks": 64, "threads": 1, **settings})
        self.groups = [ThreadGroup(rank, meeting) for rank in range(size)]
        self.runners = [Runner(asked, group) for group in self.groups]
        self._meeting = meeting
        self._threads = ThreadPoolExecutor(size)

    def __enter__(self) -> "Ranks":
        try:
            self.all(lambda runner: runner.load(lambda name, done: None))
        except BaseException:
            self._threads.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def all(self, call: Callable[[Runner], T]) -> list[T]:
        """`call` on every rank at once. The first rank's error is raised, and ends the waiting of the others."""

        def run(runner: Runner) -> T:
            try:
                return call(runner)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        pending = [self._threads.submit(run, runner) for runner in self.runners]
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            self._meeting.barrier.reset()
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        assert len({group.calls for group in self.groups}) == 1
        return [future.result() for future in pending]

    def execute(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """The logits of rank 0; the others have none."""
        logits, *others = self.all(lambda runner: runner.execute(batch))
        assert others == [None] * (len(self.runners) - 1)
        return logits


class Context(EngineContext):
    rendezvous = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.world_size = rank, size

    def wake(self) -> None: ...
    def phase(self, name: str, done: float | None = None) -> None: ...
    def adopt(self, pid: int) -> None: ...


@contextmanager
def engine_of(directory: Path, size: int, **settings: Any) -> Iterator[TpEngine]:
    """Rank 0's engine, which the others follow until it is closed."""
    meeting = Meeting(size)
    groups: list[Group] = [Alone()] if size == 1 else [ThreadGroup(rank, meeting) for rank in range(size)]
    asked = TpSettings(**{"model": str(directory), "threads": 1, "tensor_parallel_size": size, **settings})
    first, *others = engines = [TpEngine(asked) for _ in groups]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as threads:
        patch.setattr("tllm_core.engines.tp.director.connect", lambda context, *_: groups[context.rank])
        list(threads.map(lambda rank: engines[rank].start(Context(rank, size)), range(size)))
        following = [threads.submit(engine.follow) for engine in others]
        try:
            yield first
        except BaseException:
            meeting.barrier.abort()
            raise
        first.close()
        for done in following:
            done.result(MEET_S)
    assert len({group.calls for group in groups if isinstance(group, ThreadGroup)}) <= 1
