"""The watcher's own lane: beats, obituaries and the orderly end, told to every attached frontend.

It has a port and sessions of its own, so that what it says depends on no rank. A thread opens the lane and reads what comes
back; words may be given to it from the watcher's loop at any time.
"""

from __future__ import annotations

import contextlib
import os
import threading

from tllm_core.contracts.interfaces import Capability, EngineAddress, Failed, WorldSpec
from tllm_core.contracts.messages import Beat, EngineInfo, Obituary, Stopping
from tllm_core.errors import PortClosed, TransportError
from tllm_core.wire.link import EngineLink
from tllm_core.world.lane import engine_link, transport_of
from tllm_core.world.words import failed_of

SUFFIX = "-watch"
FLUSH_S = 0.3
"""How long the last words may take to be acknowledged."""
OPEN_S = 5.0
"""How long the end waits for a lane that is just being opened."""


class Herald:
    """Opens at once, in a thread. `opened`: a descriptor that becomes readable once `settled`, which is when
    `address` or `failed` is known. Both stay None where the transport serves one frontend only.
    """

    def __init__(self, spec: WorldSpec) -> None:
        self.address: EngineAddress | None = None
        self.failed: Failed | None = None
        self.opened, self._writer = os.pipe()
        self._spec = spec
        self._link: EngineLink | None = None
        self._closing = False
        self.settled = False
        self._spoken = False
        self._thread = threading.Thread(target=self._run, name="tllm-herald", daemon=True)
        self._thread.start()

    def beat(self, beat: Beat) -> None:
        """To every session; one whose port is full misses it."""
        if self._link is not None and not self._spoken:
            with contextlib.suppress(TransportError):
                self._link.beat(beat)

    def announce(self, words: Obituary | Stopping) -> None:
        """The last words, to every session; only the first ones count."""
        if self._spoken:
            return
        self._spoken = True
        if self._link is not None:
            with contextlib.suppress(TransportError):
                self._link.broadcast(words)

    def close(self) -> None:
        """Waits until the last words are acknowledged, FLUSH_S at most, and frees the port."""
        self._closing = True
        if self._link is not None:
            self._link.wake()
        self._thread.join(OPEN_S)

    def _run(self) -> None:
        try:
            self._link = self._open()
        except Exception as error:
            self.failed = failed_of(error, None)
        finally:
            self.settled = True
            os.close(self._writer)
        if self._link is None:
            return
        try:
            while not self._closing:
                self._link.receive(None)
        except PortClosed:
            return
        finally:
            self._link.close(FLUSH_S)

    def _open(self) -> EngineLink | None:
        spec = self._spec
        transport = transport_of(spec)
        if Capability.MANY_FRONTENDS not in transport.capabilities:
            return None
        port = transport.listen(spec.engine_name + SUFFIX, spec.watch_generation)
        self.address = port.address
        return engine_link(spec, transport, port, EngineInfo(model=f"the watcher of {spec.engine_name}"))


def obituary_for(words: Failed) -> Obituary:
    """What the world's end means to frontends."""
    return Obituary(words.message, words.rank, words.exitcode, words.traceback, words.stderr_tail)
