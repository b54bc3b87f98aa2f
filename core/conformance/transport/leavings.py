"""Closing in every state, and what is left afterwards: nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.transport.streams import ask
from tllm_core.conformance.transport.subject import LONG, PATIENCE_S, TransportSubject, descriptors, until
from tllm_core.contracts.interfaces import Capability, Identity
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import ExecutorClosedError, TransportError
from tllm_core.world.process import wait_gone

STREAM = SamplingParams(max_tokens=LONG)
CLOSE_S = 15.0
"""Three times the bound of a shutdown of what is dead."""


class LeavingCases(TransportSubject):
    """Whatever happened, the end comes soon and leaves nothing."""

    @case("I1", "I7", timeout_s=60.0)
    def test_shutdown_with_open_streams_from_many_threads(self) -> None:
        """`shutdown` ends every pending stream with ExecutorClosedError, also when several threads call it at once.

        If this fails: an executor's end waits for its port.
        """
        world = self.start()
        results = [world.owner.generate_async([number + 1], STREAM) for number in range(16)]
        for result in results:
            next(result)
        threads = [threading.Thread(target=world.owner.shutdown, args=(20.0,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for result in results:
            with pytest.raises(ExecutorClosedError):
                result.result(0)
        world.owner.shutdown()

    @case("I7", needs=Capability.CROSS_PROCESS, timeout_s=60.0)
    def test_shutdown_of_a_frozen_world_leaves_no_process(self) -> None:
        """`shutdown` of a world that stands still returns within its bound, and no process survives it.

        If this fails: an end waits for an answer that never comes.
        """
        world = self.start()
        result = world.owner.generate_async([1], STREAM)
        next(result)
        processes = world.processes
        world.freeze()
        started = time.monotonic()
        world.owner.shutdown(1.0)
        assert time.monotonic() - started < CLOSE_S
        assert wait_gone(processes, CLOSE_S)

    @case("I7", needs=Capability.RECONNECTS, timeout_s=60.0)
    def test_ports_close_while_their_broker_is_frozen_or_gone(self) -> None:
        """`close` of either end returns within its bound while the broker stands still, and while it is gone.

        If this fails: `close` waits for the other side.
        """
        server = type(self).broker
        if server is None:
            pytest.skip("there is no broker between its ends")
        self.server_address()
        self.open.callback(self.server_address)
        for trouble, relief in ((server.freeze, server.thaw), (server.kill, server.restart)):
            pair = self.pair()
            peer, _ = pair.frontend()
            self.endings.append(relief)
            trouble()
            try:
                with contextlib.suppress(TransportError):
                    pair.engine.send(peer, [b"into nothing"])
                started = time.monotonic()
                pair.close()
                assert time.monotonic() - started < CLOSE_S
            finally:
                relief()

    @case("I7")
    def test_a_port_that_was_never_used_closes(self) -> None:
        """Ports close right after they were made, also a frontend's whose engine is gone already.

        If this fails: `close` waits for a first frame.
        """
        pair = self.pair()
        _, frontend = pair.frontend()
        pair.engine.close()
        frontend.close()
        fresh = self.pair()
        fresh.close()

    @case("I7", "I8", timeout_s=90.0)
    def test_nothing_is_left_behind(self) -> None:
        """After ports and whole worlds, closed and killed: no thread, descriptor, process, file or key of theirs is there.

        If this fails: something is opened that nobody closes, or a dead engine's remains are not discarded.
        """
        self.end_world()
        self._lives()  # what a first use opens for good is no leak
        gc.collect()
        before = set(threading.enumerate())
        count = descriptors()
        for _ in range(3):
            self._lives()
        processes = self._whole_life()
        assert wait_gone(processes, CLOSE_S), "a process is left"
        until(lambda: not (set(threading.enumerate()) - before), "no thread is left")
        until(lambda: descriptors() <= count, f"no descriptor is left: {count} before")
        files = [path.name for path in Path(self.directory).rglob("*") if not path.is_dir()]
        assert files == [], "a file is left"
        until(lambda: list(self.leftovers()) == [], "nothing is left outside of this process")

    def _lives(self) -> None:
        pair = self.pair()
        for _ in range(3):
            pair.frontend()
        pair.close()

    def _whole_life(self) -> list[Identity]:
        world = self.start()
        ask(world.owner, [1, 2])
        processes = list(world.processes)
        if self.claims(Capability.MANY_FRONTENDS):
            ask(world.attach(), [2, 3])
        world.close()
        if self.claims(Capability.CROSS_PROCESS):
            killed = self.start()
            processes += killed.processes
            killed.end()
            assert killed.owner.wait_ended(PATIENCE_S)
            killed.close()
        return processes
