"""A world as a case sees it: all that it has said, its processes, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, Identified, Identity, Ready, World, WorldEvent
from tllm_core.world.process import is_alive, wait_gone

PATIENCE_S = 30.0
"""How long anything may take that must happen, on a busy machine."""
GONE_S = 10.0
Event = TypeVar("Event")


class Watched:
    """`seen`: the events so far, without beats, which are in `beats`. poll_s: how long one wait for events may last."""

    def __init__(self, world: World, poll_s: float = PATIENCE_S) -> None:
        self.world = world
        self._poll_s = poll_s
        self.seen: list[WorldEvent] = []
        self.beats: list[Beaten] = []
        self._unread: deque[WorldEvent] = deque()

    def until(self, kind: type[Event], when: Callable[[Event], bool] = lambda event: True) -> Event:
        """The next event of that kind; AssertionError where it does not come, or the world ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            while self._unread:
                event: Any = self._unread.popleft()
                (self.beats if isinstance(event, Beaten) else self.seen).append(event)
                if isinstance(event, kind) and when(event):
                    return event
                assert not isinstance(event, Exited), f"the world ended before {kind.__name__}: {self.seen}"
            self._unread.extend(self.world.events(min(left, self._poll_s)))
        raise AssertionError(f"no {kind.__name__} within {PATIENCE_S:g} s, after {self.seen}")

    def watch(self, seconds: float) -> None:
        """Notes what the world says for that long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            events = [*self._unread, *self.world.events(min(left, self._poll_s))]
            self._unread.clear()
            self.seen.extend(event for event in events if not isinstance(event, Beaten))
            self.beats.extend(event for event in events if isinstance(event, Beaten))

    def ready(self) -> Identified:
        """Waits for Ready; the world's processes."""
        event: Any = self.until(Ready | Failed)  # type: ignore[arg-type]
        assert isinstance(event, Ready), f"the world did not get ready: {event}"
        return self.identified()

    def identified(self) -> Identified:
        """The first event, waited for where it has not come yet."""
        found = self.of(Identified)
        return found[0] if found else self.until(Identified)

    def of(self, kind: type[Event]) -> list[Event]:
        """The events of that kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    @property
    def processes(self) -> list[Identity]:
        """Of the world, so far as they are told and are not this one."""
        told = [identity for event in self.of(Identified) for identity in (*event.ranks, event.watcher)]
        return [identity for identity in told if identity is not None and identity.pid != os.getpid()]

    def check_gone(self) -> None:
        """AssertionError where a process of it lives on."""
        assert wait_gone(self.processes, GONE_S), f"a process outlived its world: {self._alive()}"

    def end(self) -> None:
        """Kills the world, and what it leaves, which is an AssertionError."""
        self.world.kill()
        if not self.of(Identified):
            self._unread.extend(self.world.events(0))
            self.seen.extend(event for event in self._unread if isinstance(event, Identified))
        try:
            self.check_gone()
        finally:
            self.sweep()

    def sweep(self) -> None:
        """SIGKILL for every process of it that is there."""
        for identity in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, signal.SIGKILL)

    def _alive(self) -> list[Identity]:
        return [identity for identity in self.processes if is_alive(identity)]
