"""What the watcher tells: its owner over their channel, and attached frontends over a lane of its own."""

from __future__ import annotations

from collections.abc import Callable

from tllm_core.contracts.interfaces import Beaten, EngineAddress, Failed, Listening, Ready, WorldSpec
from tllm_core.contracts.messages import Beat, Obituary, Stopping
from tllm_core.world.channel import Channel, ToWatcher
from tllm_core.world.herald import Herald, obituary_for
from tllm_core.world.lane import discard
from tllm_core.world.loop import Loop


class News:
    """The owner hears that the world listens once rank 0 and this process do, and only then that it is ready.

    fail: called with the reason where the lane can't be had.
    """

    def __init__(self, owner: Channel[ToWatcher], spec: WorldSpec, fail: Callable[[Failed], None]) -> None:
        self._owner, self._spec, self._fail = owner, spec, fail
        self._herald: Herald | None = None
        self._address: EngineAddress | None = None
        self._ready: Ready | None = None
        self._listens = False

    def open(self, loop: Loop) -> None:
        """Begins to open the lane, where the world is to have one."""
        if self._spec.watch_generation:
            self._herald = Herald(self._spec)
            loop.once(self._herald.opened, self._judge)

    def listening(self, address: EngineAddress) -> None:
        """Rank 0 listens."""
        self._address = address
        self._judge()

    def ready(self, words: Ready) -> None:
        """All ranks are ready."""
        self._ready = words
        if self._listens:
            self._owner.send(words)

    def beat(self, beat: Beat) -> None:
        """Where the owner or a frontend does not read, beats are dropped, not queued."""
        if not self._owner.pending:
            self._owner.send(Beaten(beat))
        if self._herald is not None:
            self._herald.beat(beat)

    def fail(self, words: Failed) -> None:
        """The world is dead."""
        self.announce(obituary_for(words))
        self._owner.send(words)

    def announce(self, words: Obituary | Stopping) -> None:
        """The last words to frontends; only the first ones count."""
        if self._herald is not None:
            self._herald.announce(words)

    def close(self) -> None:
        """Removes what a dead rank 0 has left, and ends the lane."""
        if self._address is not None:
            discard(self._spec, self._address)
        if self._herald is not None:
            self._herald.announce(Stopping())
            self._herald.close()

    def _judge(self) -> None:
        herald = self._herald
        if herald is not None and herald.failed is not None:
            self._fail(herald.failed)
        elif self._address is not None and not self._listens and (herald is None or herald.settled):
            self._listens = True
            self._owner.send(Listening(self._address, None if herald is None else herald.address))
            if self._ready is not None:
                self._owner.send(self._ready)
