"""Keeps an engine's lane alive while its worker is inside a long step: acknowledges, answers attaches, hears beats.

The worker alone reads the lane as long as its steps are short. Only where a step takes longer than `AFTER_S` does a thread
read in its place; what it reads waits for the worker, in order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from tllm_core.contracts.messages import UpMessage
from tllm_core.errors import PortClosed
from tllm_core.wire.link import EngineLink

AFTER_S = 0.05
"""How long a step may take before the thread reads in the worker's place."""
STASH_COMMANDS = 4096
"""How many commands may wait for the worker; beyond it the lane's window holds frontends back."""


class Pulse:
    """`receive` and `busy` are the worker's; `close` ends the thread."""

    def __init__(self, link: EngineLink, after_s: float = AFTER_S) -> None:
        self._link, self._after_s = link, after_s
        self._stash: deque[tuple[int, UpMessage]] = deque()
        self._reading = threading.Lock()
        self._has_read = False
        self._busy_since: float | None = None
        self._began = threading.Event()
        self._is_parked = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tllm-pulse", daemon=True)
        self._thread.start()

    def busy(self) -> None:
        """The worker goes off to work, and comes back with `receive`."""
        self._busy_since = time.monotonic()
        if self._is_parked:
            self._began.set()

    def receive(self, timeout: float | None) -> list[tuple[int, UpMessage]]:
        """As EngineLink.receive, with what was read meanwhile first. May return [] early."""
        self._busy_since = None
        if not self._reading.acquire(blocking=False):
            self._link.wake()
            self._reading.acquire()
        try:
            if not self._has_read:
                return self._link.receive(timeout)
            # It may have taken a wake-up that was the worker's, who has to look again before it waits.
            self._has_read = False
            stashed = list(self._stash)
            self._stash.clear()
            return stashed + self._link.receive(0)
        finally:
            self._reading.release()

    def close(self) -> None:
        self._closed = True
        self._busy_since = None
        self._began.set()
        self._link.wake()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(PortClosed):
            while not self._closed:
                self._turn()

    def _turn(self) -> None:
        since = self._busy_since
        if since is None:
            self._park()
        elif (left := since + self._after_s - time.monotonic()) > 0:
            time.sleep(left)
        elif len(self._stash) >= STASH_COMMANDS:
            time.sleep(self._after_s)
        else:
            with self._reading:
                if self._busy_since is since:  # else the worker is back, or waits for this lock
                    self._read()

    def _read(self) -> None:
        self._has_read = True
        self._stash += self._link.receive(self._after_s)

    def _park(self) -> None:
        """Until the worker is busy; `_is_parked` goes up before the last look, so that no beginning is missed."""
        self._is_parked = True
        if self._busy_since is None and not self._closed:
            self._began.wait()
        self._is_parked = False
        self._began.clear()
