"""What a signal's handler raises while a plugin is imported is the host's own, and no fault of the plugin."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tllm_core.errors import PluginError
from tllm_core.registry import Registry, load_object

STRIKE = "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n"


class Asked(BaseException):
    """What a host's handler may raise."""


class TooLate(Exception):
    """An alarm's, for one."""


def raising(error: type[BaseException], number: int, frame: FrameType | None) -> None:
    raise error


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(7)


class Host:
    def leave(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(7)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(7)


@pytest.fixture
def handle() -> Iterator[Callable[[Any], None]]:
    """Sets the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("handler", "raised"),
    [
        (leave, SystemExit),
        (Host().leave, SystemExit),
        (Host(), SystemExit),
        (partial(raising, Asked), Asked),
        (partial(raising, TooLate), TooLate),
    ],
    ids=["function", "method", "object", "of its own kind", "an Exception"],
)
def test_it_passes_through(
    install: Callable[..., Path], tmp_path: Path, handle: Callable[[Any], None], handler: Any, raised: type
) -> None:
    install("acme-slow", "slow", STRIKE, {"plugin slow": "slow"})
    handle(handler)
    with pytest.raises(raised):
        Registry(path=[str(tmp_path)], environ={}).plugin("slow")
    with pytest.raises(raised):
        load_object("slow")


def test_what_the_plugin_raises_itself_is_its_own_also_beside_handlers(
    install: Callable[..., Path], tmp_path: Path, handle: Callable[[Any], None]
) -> None:
    install("acme-rude", "rude", "import sys\nsys.exit(3)\n", {"plugin rude": "rude"})
    handle(leave)
    with pytest.raises(PluginError, match=r"acme-rude .* is broken: SystemExit: 3"):
        Registry(path=[str(tmp_path)], environ={}).plugin("rude")
