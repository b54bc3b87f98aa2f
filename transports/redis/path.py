"""Whether a port's way to its peers works, as its two threads see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tllm_core.contracts.interfaces import PortState

WRITE, READ, ENGINE = "write", "read", "engine"
"""What may be missing: the connection that writes, the one that reads, the engine itself."""


class Path:
    """The state of one port. Every return, and every stream that vanished, moves `since`: what was on its way may be lost."""

    def __init__(self, changed: Callable[[], None]) -> None:
        now = time.monotonic()
        self.state = PortState(True, since=now)
        self._changed = changed
        self._lock = threading.Lock()
        self._missing: dict[str, str] = {}
        self._proven = {WRITE: now, READ: now}

    def lost(self, part: str, reason: str) -> None:
        with self._lock:
            known = self._missing.get(part) == reason
            self._missing[part] = reason
            if not known:
                since = time.monotonic() if self.state.up else self.state.since
                self.state = PortState(False, next(iter(self._missing.values())), since)
        if not known:
            self._changed()

    def back(self, part: str) -> None:
        with self._lock:
            was_missing = self._missing.pop(part, None) is not None
            if was_missing and not self._missing:
                self.state = PortState(True, since=time.monotonic())
            elif was_missing:
                self.state = PortState(False, next(iter(self._missing.values())), self.state.since)
        if was_missing:
            self._changed()

    def is_missing(self, part: str) -> bool:
        return part in self._missing

    def disturbed(self) -> None:
        """Something that was written may be lost, although no connection was."""
        with self._lock:
            if self.state.up:
                self.state = PortState(True, since=time.monotonic())
        self._changed()

    def proven(self, part: str, sent_at: float) -> None:
        """A command that was sent then was answered."""
        self._proven[part] = sent_at

    def ok_at(self) -> float:
        return min(self._proven.values())
