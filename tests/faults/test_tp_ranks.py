"""Ranks of a real model that die, stand still or fail: the world ends with their number and cause, and nothing is left."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_engines import save_tiny_model
from tests.faults.conftest import DEADLINE_S, Trace, Worlds
from tllm_core import EngineDeadError, EngineStartError, GenerationExecutor, SamplingParams

pytestmark = pytest.mark.timeout(300)

LIMIT = 32_768
LONG = SamplingParams(max_tokens=30_000, ignore_eos=True)
FAULTY = '''
import os
from tllm_core.contracts.interfaces import EngineSpec
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.spec import TpSettings

UNPREPARED = {3: (1, 1), 4: (1, 2), 5: (0, 2)}
"""By `seed`: the rank that has no memory to prepare its kernels, and the time at which."""

class Faulty(TpEngine):
    """Fails in the fifth step that rank 1 follows, or in its load, or where kernels are prepared: see the setting `seed`."""

    def start(self, context):
        if self.settings.seed in UNPREPARED:
            fail_to_prepare(context.rank, *UNPREPARED[self.settings.seed])
        if context.rank == 1 and self.settings.seed == 1:
            say, context.phase = context.phase, lambda name, done=None: os._exit(7) if done else say(name, done)
        return super().start(context)

    def follow(self):
        execute, self.steps = self._runner.execute, 0
        def fail(batch):
            self.steps += 1
            if self.steps == 5:
                raise ArithmeticError("lost a bit")
            return execute(batch)
        self._runner.execute = fail
        super().follow()

    def step(self):
        if self.settings.seed == 2 and self.live:
            raise ArithmeticError("can't sample")
        return super().step()

def fail_to_prepare(rank, victim, time):
    import torch
    from tllm_core.engines.tp import kernels, runner

    class Unprepared(kernels.TorchKernels):
        prepared = 0

        def prepare(self, forward, *_):
            """Ranks meet here, as in any computation."""
            self.prepared += 1
            if (rank, self.prepared) == (victim, time):
                raise torch.OutOfMemoryError("no memory is left")
            forward.__self__._group.all_reduce(torch.ones(1))

    runner.choose = lambda *_: Unprepared()

def ranks(settings):
    return settings.tensor_parallel_size

SPEC = EngineSpec(name="faulty-tp", settings_type=TpSettings, load="faulty_tp:Faulty", world_size="faulty_tp:ranks")
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": LIMIT}))
    return directory


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "faulty_tp.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "faulty_tp", raising=False)
    yield "faulty_tp:SPEC"
    monkeypatch.delitem(__import__("sys").modules, "faulty_tp", raising=False)


def start(worlds: Worlds, tiny: Path, size: int, engine: str = "tp", **settings: Any) -> GenerationExecutor:
    options = {"model": str(tiny), "tensor_parallel_size": size, "threads": 1, "num_blocks": 12_000, "kv_events": 0}
    return worlds(engine, **options, **settings)


def streams(executor: GenerationExecutor) -> list[Any]:
    return [executor.generate_async([i, 4, 5], LONG) for i in range(3, 9)]


@pytest.mark.parametrize(("size", "rank", "comm"), [(2, 1, "shm"), (3, 2, "shm"), (3, 1, "gloo"), (2, 0, "shm")])
def test_a_rank_that_is_killed_is_the_cause(
    spawned_ipc: Worlds, tiny: Path, trace: Trace, size: int, rank: int, comm: str
) -> None:
    executor = start(spawned_ipc, tiny, size, comm=comm)
    results = streams(executor)
    next(results[0])
    os.kill(executor.health().ranks[rank].pid, signal.SIGKILL)
    for result in results:
        with pytest.raises(EngineDeadError, match=f"engine rank {rank} was killed by SIGKILL") as caught:
            result.result(DEADLINE_S)
        assert caught.value.root_cause.rank == rank
    trace.until_gone()


@pytest.mark.parametrize(("size", "rank", "busy"), [(2, 1, True), (3, 2, False)])
def test_a_rank_that_stands_still_is_named(
    spawned_ipc: Worlds, tiny: Path, trace: Trace, size: int, rank: int, busy: bool
) -> None:
    executor = start(spawned_ipc, tiny, size)
    results = streams(executor) if busy else []
    for result in results[:1]:
        next(result)
    os.kill(executor.health().ranks[rank].pid, signal.SIGSTOP)
    assert executor.wait_ended(DEADLINE_S)
    for result in results:
        with pytest.raises(EngineDeadError, match=f"engine rank {rank} is stopped"):
            result.result(DEADLINE_S)
    with pytest.raises(EngineDeadError, match=f"engine rank {rank} is stopped"):
        executor.generate_async([3]).result(DEADLINE_S)
    trace.until_gone()


def test_what_a_follower_raises_is_the_cause_with_its_traceback(spawned_ipc: Worlds, tiny: Path, faulty: str) -> None:
    executor = start(spawned_ipc, tiny, 2, faulty)
    result = executor.generate_async([3, 4], LONG)
    with pytest.raises(EngineDeadError, match="ArithmeticError: lost a bit") as caught:
        result.result(DEADLINE_S)
    assert caught.value.root_cause.rank == 1
    assert "in fail" in (caught.value.root_cause.traceback or "")
    assert len(result.outputs[0].token_ids) <= 5  # what rank 0 had not handed over yet went with it


def test_what_rank_0_raises_is_the_cause_although_the_others_leave_with_it(
    spawned_ipc: Worlds, tiny: Path, faulty: str, trace: Trace
) -> None:
    executor = start(spawned_ipc, tiny, 2, faulty, seed=2)
    with pytest.raises(EngineDeadError, match="ArithmeticError: can't sample") as caught:
        executor.generate_async([3, 4], LONG).result(DEADLINE_S)
    assert caught.value.root_cause.rank == 0
    trace.until_gone()


def test_a_rank_that_exits_while_it_loads_ends_the_start(
    spawned_ipc: Worlds, tiny: Path, faulty: str, trace: Trace
) -> None:
    with pytest.raises(EngineStartError, match="engine rank 1 exited with code 7"):
        start(spawned_ipc, tiny, 2, faulty, seed=1)
    trace.until_gone()


@pytest.mark.parametrize(("seed", "rank", "method"), [(4, 1, "wakeup"), (5, 0, "reset_caches")])
def test_a_rank_that_can_t_prepare_its_kernels_anew_is_the_cause(
    spawned_ipc: Worlds, tiny: Path, faulty: str, trace: Trace, seed: int, rank: int, method: str
) -> None:
    """The others wait for it in the middle of what all compute: no answer to a control call could set that right."""
    executor = start(spawned_ipc, tiny, 2, faulty, seed=seed)
    if method == "wakeup":
        executor.control("sleep", 1)
    with pytest.raises(EngineDeadError, match="RuntimeError: no room to prepare steps of 64 sequences") as caught:
        executor.control(method, timeout=DEADLINE_S)
    assert caught.value.root_cause.rank == rank
    assert "no memory is left" in (caught.value.root_cause.traceback or "")
    trace.until_gone()


def test_a_rank_that_can_t_prepare_its_kernels_ends_the_start(
    spawned_ipc: Worlds, tiny: Path, faulty: str, trace: Trace
) -> None:
    with pytest.raises(EngineStartError, match="no room to prepare steps of 64 sequences"):
        start(spawned_ipc, tiny, 2, faulty, seed=3)
    trace.until_gone()
