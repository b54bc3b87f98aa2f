"""Capabilities: what is declared must be true, and what is true may be declared."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable

from tllm_core.conformance.case import case
from tllm_core.conformance.child import ChildEnd
from tllm_core.conformance.sequences import check_same
from tllm_core.conformance.transport.pair import ENDLESS, Pair, fill, new_peer, received, until_taken
from tllm_core.conformance.transport.subject import TransportSubject, until
from tllm_core.contracts.interfaces import Capability, EngineAddress, FrontendPort
from tllm_core.errors import PortDown, PortError, PortFull

SOON_S = 5.0


RETURN_S = 15.0
"""How long a port may take to be back: several of its own attempts, each with its own time-out."""


class ClaimCases(TransportSubject):
    """One case for each capability."""

    def _child(self, role: str, address: EngineAddress | None = None) -> ChildEnd:
        child = self.open.enter_context(ChildEnd(role, self.reference, self.options(), address))
        self.endings.append(child.kill)
        return child

    @case("I2", needs=Capability.CROSS_PROCESS, proves=True, timeout_s=60.0)
    def test_frames_cross_between_processes(self) -> None:
        """CROSS_PROCESS: a frontend in another process reaches the engine by its address, and is answered.

        If this fails: the address says something that only this process knows.
        """
        pair = self.pair()
        child = self._child("frontend", pair.engine.address)
        assert received(pair.engine, timeout_s=SOON_S) == [[b"hello from a child"]]
        pair.engine.send(child.peer, [b"welcome"])
        assert received(pair.engine, timeout_s=SOON_S) == [[b"welcome"]]

    @case("I2", needs=Capability.CROSS_HOST, proves=True)
    def test_frames_travel_over_an_address_that_other_hosts_can_reach(self) -> None:
        """CROSS_HOST: all that is sent travels over TCP connections to what the address says, by way of a proxy there.

        If this fails: frames go another way, such as files or memory of this host.
        """
        pair = self.pair()
        detour = self.detour(pair.engine.address)
        transport = self.make(self.options_through(detour))
        port = transport.connect(detour.turn(pair.engine.address), peer := new_peer())
        pair.frontends[peer] = port
        size = min(1 << 18, (pair.engine.max_frame or 1 << 18) // 2)
        payload = secrets.token_bytes(size)
        port.send([payload])
        check_same(received(pair.engine), [[payload]])
        pair.engine.send(peer, [payload])
        check_same(received(port), [[payload]])
        until(lambda: detour.moved >= 2 * size, "all of it went over the address", SOON_S)

    @case("I2", needs=Capability.MANY_FRONTENDS, proves=True)
    def test_each_of_many_frontends_gets_its_own_frames(self) -> None:
        """MANY_FRONTENDS: of eight at once, each gets what is sent to it, in order, and nothing else.

        If this fails: frontends share a queue.
        """
        pair = self.pair()
        frontends = [pair.frontend() for _ in range(8)]
        for number in range(50):
            for peer, _ in frontends:
                pair.engine.send(peer, [peer, b"%d" % number])
        for peer, port in frontends:
            check_same(received(port, 50), [[peer, b"%d" % number] for number in range(50)])

    @case("I2", "I10", needs=Capability.RELIABLE, proves=True, timeout_s=60.0)
    def test_a_receiver_that_does_not_read_holds_its_senders_back(self) -> None:
        """RELIABLE: while connected nothing is lost: a full queue refuses at once with PortFull, keeps the order of all that it
        took, has room again once it is read, and does not stop another peer.

        If this fails: frames are dropped, or taken without a bound.
        """
        pair = self.pair(**type(self).narrow)
        peer, frontend = pair.frontend()
        quick, reader = pair.frontend()
        filling = b"x" * min(65536, (pair.engine.max_frame or 1 << 20) - 64)
        for send, port in ((pair.to(peer), frontend), (frontend.send, pair.engine)):
            taken = fill(lambda number, send=send: send([b"%d" % number, filling]))  # type: ignore[misc]
            assert 0 < taken < ENDLESS, f"{taken} frames of {len(filling)} bytes were taken without a reader"
            if port is frontend:
                try:
                    pair.engine.send(quick, [b"now"])
                except PortFull:
                    raise AssertionError("a full queue stopped another peer") from None
                assert received(reader) == [[b"now"]]
            assert [int(frame[0]) for frame in received(port, taken, SOON_S)] == list(range(taken))
            until_taken(lambda send=send: send([b"again"]))  # type: ignore[misc]
            assert received(port, timeout_s=SOON_S) == [[b"again"]]

    @case("I11", needs=Capability.RECONNECTS, proves=True, timeout_s=60.0)
    def test_ports_find_each_other_again_after_an_outage(self) -> None:
        """RECONNECTS: after each of three outages, frames flow again on the same ports, in both directions.

        If this fails: a port stays down, or says that it is up while it is not.
        """
        pair = self.pair()
        detour = self.detour(pair.engine.address)
        transport = self.make(self.options_through(detour))
        peer = new_peer()
        port = transport.connect(detour.turn(pair.engine.address), peer)
        pair.frontends[peer] = port
        self._until_flowing(pair, peer, port, b"at first")
        for number in range(3):
            detour.cut()
            with contextlib.suppress(PortError):
                port.send([b"into the cut"])
            detour.heal()
            self._until_flowing(pair, peer, port, b"%d" % number)

    def _until_flowing(self, pair: Pair, peer: bytes, port: FrontendPort, mark: bytes) -> None:
        """What is lost in an outage is sent again by the lane; so it is here."""
        for send, reader in (
            (port.send, pair.engine.receive),
            (pair.to(peer), port.receive),
        ):
            deadline = time.monotonic() + RETURN_S
            while not any(bytes(frame[0]) == mark for frame in reader(0.1)):
                assert time.monotonic() < deadline, f"no frame got through: {port.state}"
                with contextlib.suppress(PortDown, PortFull):
                    send([mark])

    @case("I12", needs=Capability.PEER_LOSS, proves=True, timeout_s=120.0)
    def test_a_peer_that_is_killed_is_reported_by_the_port_itself(self) -> None:
        """PEER_LOSS: once the process at the other end is killed, the engine's `send` raises PortDown, and a frontend's port is
        down or raises PortDown.

        If this fails: frames to a process that is gone are taken.
        """
        pair = self.pair()
        child = self._child("frontend", pair.engine.address)
        received(pair.engine, timeout_s=SOON_S)
        child.kill()
        self._until_down(lambda: pair.engine.send(child.peer, [b"x"]), lambda: pair.engine.receive(0.02))
        engine = self._child("engine")
        peer = new_peer()
        port = self.make().connect(engine.address, peer)
        self.open.callback(port.close)
        port.send([peer])
        received(port, timeout_s=SOON_S)
        engine.kill()

        def send() -> None:
            if not port.state.up:
                raise PortDown(port.state.reason)
            port.send([peer])

        self._until_down(send, lambda: port.receive(0.02))

    def _until_down(self, send: Callable[[], None], rest: Callable[[], object]) -> None:
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            try:
                send()
            except PortDown:
                return
            except PortFull:
                pass
            rest()
        raise AssertionError(f"it is taken for there {SOON_S:g} s after its end")
