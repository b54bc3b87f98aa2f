"""Makes the faults of `EchoSettings.faults` happen."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count

from tllm_core.contracts.messages import TokenIds
from tllm_core.engines.echo.spec import Fault, FaultPoint
from tllm_core.errors import RequestError


class Faults:
    """The faults of one rank, with how often each was counted."""

    def __init__(self, faults: Iterable[Fault], rank: int) -> None:
        mine = [fault for fault in faults if fault.rank == rank]
        self._counts = [(fault, count(1)) for fault in mine]
        self.points: frozenset[FaultPoint] = frozenset(fault.at for fault in mine)

    def strike(self, at: FaultPoint, prompts: Iterable[TokenIds] = ()) -> None:
        """Counts a call of `at` that is about requests with these prompts, and makes what is due happen."""
        for fault in self.due(at, prompts):
            strike(fault)

    def due(self, at: FaultPoint, prompts: Iterable[TokenIds] = ()) -> list[Fault]:
        """Counts the call and returns the faults that are due."""
        due = []
        for fault, calls in self._counts if at in self.points else ():
            if fault.at == at and (fault.token is None or any(concerns(fault, prompt) for prompt in prompts)):
                strikes = next(calls) - fault.after
                if strikes > 0 and (fault.times is None or strikes <= fault.times):
                    due.append(fault)
        return due


def concerns(fault: Fault, prompt: TokenIds) -> bool:
    """Whether a request with this prompt is one that the fault is about."""
    return fault.token is None or fault.token in prompt


def strike(fault: Fault) -> None:
    """Makes it happen, here and now."""
    _DEEDS[fault.do](fault)


def _raise(fault: Fault) -> None:
    raise RuntimeError(fault.message)


def _request_error(fault: Fault) -> None:
    raise RequestError(fault.message)


def _spin(fault: Fault) -> None:
    end = time.monotonic() + fault.seconds
    while time.monotonic() < end:
        pass


def _wait_for_child(fault: Fault) -> None:
    burn = f"import time; end = time.monotonic() + {fault.seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)


def _hold_gil(fault: Fault) -> None:
    # PyDLL, unlike CDLL, keeps the lock during the call.
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(fault.seconds * 1e6)))


_DEEDS: dict[str, Callable[[Fault], None]] = {
    "raise": _raise,
    "request_error": _request_error,
    "exit": lambda fault: os._exit(fault.exitcode),
    "kill": lambda fault: os.kill(os.getpid(), fault.signal),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda fault: time.sleep(fault.seconds),
    "spin": _spin,
    "wait_for_child": _wait_for_child,
    "hold_gil": _hold_gil,
}
