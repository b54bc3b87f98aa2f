"""How the ranks of one model find each other: at the store that the launcher has bound, and over what suits their devices."""

import os
import socket
from datetime import timedelta

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tllm_core.contracts.interfaces import EngineContext
from tllm_core.engines.tp.comm import Alone, Group
from tllm_core.engines.tp.comm.futex import USABLE
from tllm_core.engines.tp.comm.gloo import GlooGroup
from tllm_core.engines.tp.comm.segment import Place, Segment, create, open_at
from tllm_core.engines.tp.comm.shm import ShmGroup
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ConfigError

_PATIENCE = timedelta(days=30)
"""How long a rank waits for the others: whoever started them knows better when to give up."""


def connect(context: EngineContext, settings: TpSettings, device: torch.device) -> Group:
    """Collective. Raises ConfigError for ranks that can't meet, or not as `settings.comm` says."""
    size = settings.tensor_parallel_size
    if context.world_size != size:
        raise ConfigError(
            f"tensor_parallel_size {size} needs {size} ranks, and here {'is' if context.world_size == 1 else 'are'}"
            f" {context.world_size}; start the engine through a launcher such as spawn, or set it to {context.world_size}"
        )
    if size == 1:
        return Alone()
    _check(settings, device)
    store, host = _store(context)
    if device.type == "cuda":
        from tllm_core.engines.tp.comm.nccl import NcclGroup

        return NcclGroup(store, context.rank, size, host, device)
    segment = None if settings.comm == "gloo" else _share(store, context.rank, size, must=settings.comm == "shm")
    if segment is None:
        return GlooGroup(store, context.rank, size, host)
    group = ShmGroup(segment, context.rank)
    group.all_reduce(torch.zeros(1))  # whoever comes through has read all that it needs of the store, which ends here
    return group


def _check(settings: TpSettings, device: torch.device) -> None:
    suited = ("auto", "nccl") if device.type == "cuda" else ("auto", "gloo", "shm")
    if settings.comm not in suited:
        raise ConfigError(
            f"comm {settings.comm!r} does not suit the device {device}; set it to one of {', '.join(suited)}"
        )


def _store(context: EngineContext) -> tuple[Store, str]:
    """The store, and this host's address on the way to it."""
    if context.rendezvous is None:
        raise ConfigError("several ranks need a rendezvous, and this launcher gives them none; use spawn")
    host, _, port = context.rendezvous.rpartition(":")
    fd = context.rendezvous_fd
    leads = context.rank == 0 and fd is not None
    store = TCPStore(
        host,
        int(port),
        is_master=leads,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=None if fd is None or not leads else os.dup(fd),
    )
    return store, host if leads else _own_address(host, int(port))


def _own_address(host: str, port: int) -> str:
    """Which of this host's addresses reaches that one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def _share(store: Store, rank: int, size: int, *, must: bool) -> Segment | None:
    """Memory that all ranks have opened, or None where one of them could not. Raises ConfigError there with `must`."""
    segment, place, words = _open(store, rank, size)
    store.set(f"shm/{rank}", words or "opened")
    said = {other: store.get(f"shm/{other}").decode() for other in range(size)}
    if place is not None:
        os.close(place.fd)
    failed = {other: text for other, text in said.items() if text != "opened"}
    if not failed:
        return segment
    if must:
        other, text = next(iter(failed.items()))
        raise ConfigError(f"comm 'shm' can't be used: rank {other}: {text}; set comm to 'gloo' or 'auto'")
    return None


def _open(store: Store, rank: int, size: int) -> tuple[Segment | None, Place | None, str]:
    """This rank's view, rank 0's place of it, and why there is none."""
    if rank == 0:
        segment, place, words = _create(size)
        store.set("shm", "" if place is None else str(place))
        return segment, place, words
    told = store.get("shm").decode()
    if not told:
        return None, None, ""
    try:
        return open_at(Place.parse(told), size), None, "" if USABLE else _UNUSABLE
    except OSError as error:
        return None, None, f"shared memory can't be opened: {error}"


_UNUSABLE = "it needs Linux on 64-bit x86"


def _create(size: int) -> tuple[Segment | None, Place | None, str]:
    if not USABLE:
        return None, None, _UNUSABLE
    try:
        segment, place = create(size)
    except OSError as error:
        return None, None, f"shared memory can't be made: {error}"
    return segment, place, ""
