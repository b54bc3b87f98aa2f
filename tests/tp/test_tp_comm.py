"""Groups of ranks: all of a group's calls mean the same over shared memory and over sockets, to the bit."""

import os
import platform
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tllm_core.contracts.interfaces import EngineContext
from tllm_core.engines.tp.comm import Alone, Group, nccl, segment
from tllm_core.engines.tp.comm import connect as connecting
from tllm_core.engines.tp.comm.agree import least, texts, together
from tllm_core.engines.tp.comm.connect import connect
from tllm_core.engines.tp.comm.gloo import GlooGroup
from tllm_core.engines.tp.comm.nccl import NcclGroup
from tllm_core.engines.tp.comm.shm import ShmGroup
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError, ControlError

T = TypeVar("T")
CPU = torch.device("cpu")
KINDS = {"gloo": GlooGroup, "shm": ShmGroup}
if platform.machine() != "x86_64":
    del KINDS["shm"]


class Context(EngineContext):
    """One rank of a world whose ranks are threads."""

    def __init__(self, rank: int, size: int, store: socket.socket | None) -> None:
        self.rank, self.world_size = rank, size
        self.rendezvous = None if store is None else f"127.0.0.1:{store.getsockname()[1]}"
        self.rendezvous_fd = None if store is None or rank else store.fileno()

    def wake(self) -> None: ...
    def phase(self, name: str, done: float | None = None) -> None: ...
    def adopt(self, pid: int) -> None: ...


def each(size: int, call: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))


def meet(size: int, comm: Any) -> list[Group]:
    settings = TpSettings(tensor_parallel_size=size, comm=comm)
    with closing(socket.create_server(("127.0.0.1", 0))) as store:
        return each(size, lambda rank: connect(Context(rank, size, store), settings, CPU))


@pytest.fixture(params=[(kind, size) for kind in KINDS for size in (2, 3)], ids=lambda param: f"{param[0]}-{param[1]}")
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    kind, size = request.param
    groups = meet(size, kind)
    assert [(type(group), group.rank, group.size) for group in groups] == [(KINDS[kind], r, size) for r in range(size)]
    yield groups
    for group in groups:
        group.close()
        group.close()


def all_of(groups: list[Group], call: Callable[[Group], T]) -> list[T]:
    return each(len(groups), lambda rank: call(groups[rank]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5), (8, 576), (3, 200_001)], ids=str)
def test_sums_are_in_rank_order_and_the_same_bits_everywhere(
    groups: list[Group], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in groups]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    for _ in range(3):  # slots are used again
        mine = [part.clone() for part in parts]
        sums = all_of(groups, lambda group: group.all_reduce(mine[group.rank]))  # noqa: B023
        for x, given in zip(sums, mine, strict=True):
            assert x is given
            assert torch.equal(x, total.to(dtype))


def test_what_is_not_contiguous_is_summed_all_the_same(groups: list[Group]) -> None:
    sums = all_of(groups, lambda group: group.all_reduce(torch.arange(6.0).view(2, 3).t()))
    assert all(torch.equal(x, torch.arange(6.0).view(2, 3).t() * len(groups)) for x in sums)


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (1, 7), (8, 24_576), (70, 9000), (2, 300_000)])
def test_rank_0_has_all_side_by_side_and_the_others_nothing(groups: list[Group], rows: int, columns: int) -> None:
    parts = [
        torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + rank for rank in range(len(groups))
    ]
    first, *others = all_of(groups, lambda group: group.gather(parts[group.rank]))
    assert first is not None
    assert torch.equal(first, torch.cat(parts, dim=1))
    assert others == [None] * (len(groups) - 1)


@pytest.mark.parametrize("count", [0, 1, 1022, 1023, 1024, 1025, 262_142, 262_143, 262_144, 600_000])
def test_everybody_hears_what_rank_0_says(groups: list[Group], count: int) -> None:
    values = array("i", range(-1, count - 1))
    heard = all_of(groups, lambda group: group.broadcast(None if group.rank else values))
    assert heard == [values] * len(groups)


def test_only_rank_0_speaks(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="rank 0 broadcasts"):
        groups[0].broadcast(None)
    with pytest.raises(ValueError, match="rank 0 broadcasts"):
        groups[1].broadcast(array("i", [1]))


def test_thousands_of_mixed_calls_at_different_speeds_stay_in_step(groups: list[Group]) -> None:
    rounds = 400

    def work(group: Group) -> list[float]:
        found = []
        for step in range(rounds):
            if step % 97 == 31 * group.rank:
                threading.Event().wait(0.005)  # one falls behind, another each time
            (number,) = group.broadcast(None if group.rank else array("i", [step]))
            x = group.all_reduce(torch.full((4,), float(number + group.rank)))
            sides = group.gather(x[None, :2] + group.rank)
            found.append(float(x[0]) if sides is None else float(sides.sum()) - 3 * float(x[0]))
        return found

    size = len(groups)
    first, *others = all_of(groups, work)
    sums = [size * step + size * (size - 1) / 2 for step in range(rounds)]
    assert others == [sums] * (size - 1)
    assert first == [(2 * size - 3) * total + size * (size - 1) for total in sums]


class OnGpu(torch.Tensor):
    """One that says so."""

    is_cuda = True  # type: ignore[assignment]


class InPlaceOfNccl:
    """Another of torch's backends, which have the same methods and are as strict about their arguments."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.gloo = GlooGroup(store, rank, size, "127.0.0.1")._gloo
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return (lambda: None) if name == "abort" else getattr(self.gloo, name)


def test_what_is_on_gpus_goes_over_nccl_and_the_rest_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl, "_nccl", InPlaceOfNccl)
    settings = TpSettings(tensor_parallel_size=3)
    with closing(socket.create_server(("127.0.0.1", 0))) as store:
        found = each(3, lambda rank: connect(Context(rank, 3, store), settings, torch.device("cuda", rank)))
    groups = [group for group in found if isinstance(group, NcclGroup)]
    backends: list[InPlaceOfNccl] = [group._nccl for group in groups]
    parts = [torch.arange(6.0).view(2, 3) + rank for rank in range(3)]

    def work(group: NcclGroup) -> None:
        own = parts[group.rank]
        mine = own.clone().as_subclass(OnGpu)
        assert group.all_reduce(mine) is mine
        assert torch.equal(mine, sum(parts, torch.zeros(2, 3)))
        for x in (own.as_subclass(OnGpu), own):
            beside = group.gather(x)
            assert beside is None if group.rank else torch.equal(beside, torch.cat(parts, dim=1))
        assert torch.equal(group.all_reduce(own.t()), sum(parts, torch.zeros(2, 3)).t())
        assert least(group, 9 - group.rank) == 7

    each(3, lambda rank: work(groups[rank]))
    for group, backend in zip(groups, backends, strict=True):
        assert backend.calls == ["allreduce", "gather"]
        group.close()
        group.close()
        assert backend.calls[2:] == ["abort"]
        with pytest.raises(RuntimeError, match="is closed"):
            group.all_reduce(parts[0].as_subclass(OnGpu))


@pytest.mark.skipif("shm" not in KINDS, reason="shared memory is for 64-bit x86")
def test_counters_go_round_after_two_to_the_32_meetings() -> None:
    made, place = segment.create(2)
    os.close(place.fd)
    groups: list[Group] = [ShmGroup(made, rank) for rank in (0, 1)]
    for group, counter in zip(groups, made.counters, strict=True):
        counter.value = group._number = 2**32 - 3  # type: ignore[attr-defined]
    for step in range(8):
        sums = all_of(groups, lambda group: float(group.all_reduce(torch.full((1,), step + 1.0))))  # noqa: B023
        assert sums == [2 * (step + 1.0)] * 2
    assert {counter.value for counter in made.counters} == {5}


def test_a_rank_that_waits_for_an_order_uses_no_cpu(groups: list[Group]) -> None:
    heard = threading.Event()
    used: list[float] = []

    def idle(group: Group) -> None:
        if group.rank == 0:
            heard.wait(1.0)
            group.broadcast(array("i", [1]))
            return
        began = time.thread_time()
        group.broadcast(None)
        used.append(time.thread_time() - began)

    all_of(groups, idle)
    assert max(used) < 0.1, f"CPU seconds while idle for a second: {used}"


def test_ranks_take_the_least_of_their_numbers_and_say_what_each_has(groups: list[Group]) -> None:
    assert all_of(groups, lambda group: least(group, 2**30 - group.rank)) == [2**30 - len(groups) + 1] * len(groups)
    first, *others = all_of(groups, lambda group: texts(group, f"é{group.rank}" * group.rank))
    assert first == [f"é{rank}" * rank for rank in range(len(groups))]
    assert others == [[]] * (len(groups) - 1)


def test_what_one_rank_refuses_all_refuse_and_they_go_on_together(groups: list[Group]) -> None:
    def refuse(group: Group) -> str:
        try:
            with together(group):
                if group.rank == 1:
                    raise ControlError("no room: 3 of 5 MiB é")
        except (ControlError, ConfigError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    own = "ControlError: no room: 3 of 5 MiB é"
    told = "ConfigError: engine rank 1: no room: 3 of 5 MiB é"
    for _ in range(2):
        assert all_of(groups, refuse) == [told, own, told][: len(groups)]
    with pytest.raises(ControlError), together(Alone()):
        raise ControlError("alone")


@pytest.mark.skipif("shm" not in KINDS, reason="shared memory is for 64-bit x86")
def test_where_memory_can_t_be_shared_auto_takes_sockets_and_shm_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: object, size: int) -> None:
        raise OSError("process 7 is another one here")

    monkeypatch.setattr(connecting, "open_at", refuse)
    groups = meet(2, "auto")
    assert [type(group) for group in groups] == [GlooGroup, GlooGroup]
    for group in groups:
        group.close()
    with pytest.raises(ConfigError, match=r"rank 1: shared memory can't be opened: process 7 .*'gloo' or 'auto'"):
        meet(2, "shm")


@pytest.mark.skipif("shm" not in KINDS, reason="shared memory is for 64-bit x86")
def test_memory_of_another_process_is_not_taken_for_rank_0s() -> None:
    made, place = segment.create(2)
    with pytest.raises(OSError, match="rank 0 is not on this host"):
        segment.open_at(segment.Place(place.pid, place.fd, bytes(16)), 2)
    with pytest.raises(OSError, match="rank 0 is not on this host"):
        segment.open_at(place, 3)
    assert segment.open_at(segment.Place.parse(str(place)), 2).token == made.token
    os.close(place.fd)


def test_a_world_that_does_not_fit_the_settings_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 needs 2 ranks, and here is 1"):
        connect(Context(0, 1, None), TpSettings(tensor_parallel_size=2), CPU)
    with pytest.raises(ConfigError, match="gives them none; use spawn"):
        connect(Context(0, 2, None), TpSettings(tensor_parallel_size=2), CPU)
    with pytest.raises(ConfigError, match="comm 'nccl' does not suit the device cpu; set it to one of auto, gloo, shm"):
        connect(Context(0, 2, None), TpSettings(tensor_parallel_size=2, comm="nccl"), CPU)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1, not 0"):
        TpSettings(tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most 64, not 65"):
        TpSettings(tensor_parallel_size=65)


def test_one_rank_is_the_whole() -> None:
    alone, x, values = connect(Context(0, 1, None), TpSettings(), CPU), torch.ones(2, 3), array("i", [1, 2])
    assert isinstance(alone, Alone)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.all_reduce(x) is x
    assert alone.gather(x) is x
    assert alone.broadcast(values) is values
    assert least(alone, 7) == 7
    assert texts(alone, "é") == ["é"]


def test_rank_0_does_not_wait_for_itself() -> None:
    with pytest.raises(ValueError, match="rank 0 broadcasts"):
        Alone().broadcast(None)


def test_closing_twice_is_quiet() -> None:
    alone = Alone()
    alone.close()
    alone.close()
