"""The way between the two ends: cuts, brokers that restart or freeze, and one that stays away."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from tllm_core.conformance.broker import BrokerProcess
from tllm_core.conformance.case import case
from tllm_core.conformance.faults import EngineProcess
from tllm_core.conformance.transport.streams import ask, check_free, check_tokens
from tllm_core.conformance.transport.subject import LONG, PATIENCE_S, TransportSubject, until
from tllm_core.contracts.interfaces import Capability, Port
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import BrokerLost
from tllm_core.executor import GenerationExecutor

MANY = Capability.RECONNECTS | Capability.MANY_FRONTENDS | Capability.CROSS_PROCESS
FROZEN_S = 1.5
STALE_S = 0.5
"""How much later than its end the last proof of a path may be dated."""


class Crowd:
    """Streams of one executor that are read as they come, by a thread of their own."""

    def __init__(self, executor: GenerationExecutor, count: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens)
        self._count = tokens
        self._results = [executor.generate_async([number + 1, 7], params) for number in range(count)]
        self.tokens: list[list[int]] = [[] for _ in self._results]
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        try:
            for update in self._results[number]:
                self.tokens[number] += update.outputs[0].token_ids_diff
        except Exception as error:
            self.errors.append(error)

    def reached(self, count: int) -> None:
        """Waits until every stream has so many tokens."""
        until(lambda: self.errors or min(map(len, self.tokens)) >= count, f"every stream has {count} tokens")
        assert self.errors == []

    def check(self) -> None:
        """All ended complete."""
        self.join()
        assert self.errors == []
        assert {len(tokens) for tokens in self.tokens} == {self._count}

    def join(self) -> None:
        """All ended, with exact prefixes."""
        for thread in self._threads:
            thread.join(PATIENCE_S * 2)
            assert not thread.is_alive(), "a stream hangs"
        for number, tokens in enumerate(self.tokens):
            check_tokens(tokens, [number + 1, 7])


class PathCases(TransportSubject):
    """An outage changes nothing that is received, and is never taken for the engine."""

    def _server(self) -> BrokerProcess:
        server = type(self).broker
        if server is None:
            pytest.skip("there is no broker between its ends")
        self.server_address()
        self.open.callback(self.server_address)
        return server

    @case("I11", "I12", timeout_s=60.0)
    def test_path_ok_at_is_fresh_just_while_the_way_works(self) -> None:
        """`path_ok_at` of either end keeps up with the time, stands still while a broker does, and goes on after it.

        If this fails: a silence of the own path is taken for the engine's death, or no death is ever told by silence.
        """
        pair = self.pair()
        _, frontend = pair.frontend()
        ports = {"engine": pair.engine, "frontend": frontend}
        self._all_proven(ports)
        if type(self).broker is None:
            return
        server = self._server()
        self.endings.append(server.thaw)
        server.freeze()
        try:
            frozen_at = time.monotonic()
            threading.Event().wait(FROZEN_S)
            for name, port in ports.items():
                beyond = port.path_ok_at() - frozen_at
                assert beyond < STALE_S, f"the {name}'s path was proven {beyond:.1f} s after the broker stood still"
        finally:
            server.thaw()
        self._all_proven(ports)

    def _all_proven(self, ports: Mapping[str, Port]) -> None:
        """From now on, and by a time that is not to come."""
        asked_at = time.monotonic()
        for name, port in ports.items():
            until(functools.partial(_is_proven, port, asked_at), f"the {name}'s path is proven")
            assert port.path_ok_at() <= time.monotonic(), f"the {name}'s path is proven at a time to come"

    @case("I2", "I11", needs=MANY, timeout_s=90.0)
    def test_cut_connections_change_nothing_that_is_received(self) -> None:
        """A frontend whose slow connections are cut four times, with frames on their way, gets exactly its tokens.

        If this fails: frames are lost or repeated when a connection is made anew, or it is not made anew.
        """
        world = self.world()
        detour = self.detour(world.address)
        frontend = world.attach(options=self.options_through(detour), through=detour)
        for proxy in detour.proxies.values():
            proxy.delay_s = 0.02  # what is on its way at any time is lost with the connection
        crowd = Crowd(frontend, 16, 900)
        for number in range(4):
            crowd.reached(20 + number * 120)
            detour.cut()
            detour.heal()
        crowd.check()
        frontend.shutdown(5.0)
        check_free(world)

    def _around(self, world: EngineProcess, trouble: Callable[[BrokerProcess], None]) -> None:
        server = self._server()
        crowds = [Crowd(world.owner, 32, 800), Crowd(world.attach(), 16, 800)]
        for crowd in crowds:
            crowd.reached(10)
        trouble(server)
        for crowd in crowds:
            crowd.check()
        assert world.owner.check_health()

    @case("I2", "I11", needs=MANY, timeout_s=120.0)
    def test_a_broker_that_is_killed_and_restarted_changes_nothing(self) -> None:
        """Three kills of a broker that keeps nothing: every stream of every frontend is exact.

        If this fails: what a broker forgets is not sent again, or is sent twice, or a name, subject or key is not set up anew.
        """
        self._server()

        def restart(server: BrokerProcess) -> None:
            for _ in range(3):
                server.restart()
                ask(world.owner, [4, 4], 10)

        world = self.world()
        self._around(world, restart)
        check_free(world)

    @case("I2", "I11", needs=MANY, timeout_s=90.0)
    def test_a_broker_that_freezes_is_no_dead_engine(self) -> None:
        """A broker that stands still for longer than `dead_after_s` loses nothing and ends nobody.

        If this fails: a silence of the own path is taken for the engine's.
        """
        self._server()

        def freeze(server: BrokerProcess) -> None:
            server.freeze()
            try:
                threading.Event().wait(FROZEN_S)
            finally:
                server.thaw()

        self._around(self.start(liveness__dead_after_s=1.0), freeze)

    @case("I1", "I11", needs=MANY, timeout_s=90.0)
    def test_a_broker_that_stays_away_ends_all_with_its_own_error(self) -> None:
        """After `broker_down_after_s` every pending stream raises BrokerLost, not EngineDeadError.

        If this fails: callers wait for ever, or are told that the engine died.
        """
        server = self._server()
        world = self.start(liveness__broker_down_after_s=1.5)
        crowd = Crowd(world.owner, 16, LONG)
        crowd.reached(3)
        server.kill()
        crowd.join()
        assert {type(error) for error in crowd.errors} == {BrokerLost}
        assert len(crowd.errors) == 16
        with pytest.raises(BrokerLost):
            world.owner.generate_async([1, 2])
        server.restart()


def _is_proven(port: Port, asked_at: float) -> bool:
    return port.path_ok_at() >= asked_at
