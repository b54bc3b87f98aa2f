"""Full, down and closed ports, names and generations: what the lanes above rely on when something ends."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.sequences import check_same
from tllm_core.conformance.transport.pair import (
    ARRIVES_S,
    in_thread,
    joined,
    new_peer,
    received,
    until_blocked,
    until_taken,
)
from tllm_core.conformance.transport.subject import TransportSubject
from tllm_core.contracts.interfaces import Frame, Port
from tllm_core.errors import PortClosed, PortDown, PortFull, TransportError


class EndCases(TransportSubject):
    """What ports promise when something ends."""

    @case("I3")
    def test_an_unknown_peer_is_port_down(self) -> None:
        """The engine's `send` to a peer that it never heard of raises PortDown.

        If this fails: frames for nobody are taken, and kept or lost silently.
        """
        pair = self.pair()
        with pytest.raises(PortDown):
            pair.engine.send(new_peer(), [b"x"])

    @case("I8")
    def test_a_frontend_that_left_becomes_port_down(self) -> None:
        """Once a frontend has closed its port, the engine's `send` to it soon raises PortDown.

        If this fails: the engine keeps what it holds for frontends that are gone.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        frontend.close()

        def send_until_refused() -> None:
            deadline = time.monotonic() + ARRIVES_S
            while time.monotonic() < deadline:
                pair.engine.send(peer, [b"x"])
                pair.engine.receive(0.001)

        with pytest.raises(PortDown):
            send_until_refused()
        pair.engine.forget(peer)

    @case("I9")
    def test_a_name_is_refused_while_its_holder_lives(self) -> None:
        """`listen` under the name of a live engine raises TransportError, which names it; afterwards the name is free.

        If this fails: two engines share a name, or a name stays taken.
        """
        name = f"model-{secrets.token_hex(4)}"
        first = self.make().listen(name, 1)
        self.open.callback(first.close)
        with pytest.raises(TransportError, match=name):
            self.make().listen(name, 2)
        first.close()
        second = self.make().listen(name, 2)
        self.open.callback(second.close)
        assert (second.address.engine, second.address.generation) == (name, 2)

    @case("I9")
    def test_frames_of_an_old_generation_reach_no_new_one(self) -> None:
        """What a frontend of a former generation sends never arrives at the next engine of that name.

        If this fails: paths, subjects or keys do not contain the generation.
        """
        name, transport = f"model-{secrets.token_hex(4)}", self.make()
        first = transport.listen(name, 1)
        self.open.callback(first.close)
        old = transport.connect(first.address, new_peer())
        self.open.callback(old.close)
        old.send([b"to the first"])
        assert received(first) == [[b"to the first"]]
        first.close()
        second = transport.listen(name, 2)
        self.open.callback(second.close)
        with contextlib.suppress(PortDown, PortFull):
            old.send([b"late"])
        new = transport.connect(second.address, new_peer())
        self.open.callback(new.close)
        new.send([b"to the second"])
        assert received(second) == [[b"to the second"]]
        assert list(second.receive(0.3)) == []

    @case("I7")
    def test_close_ends_a_blocked_receive(self) -> None:
        """`close` from another thread makes a `receive` that waits raise PortClosed, at either end.

        If this fails: the end of an executor hangs.
        """
        for side in (0, 1):
            pair = self.pair()
            _, frontend = pair.frontend()
            ports: tuple[Port, Port] = (pair.engine, frontend)
            thread, outcome = in_thread(lambda port=ports[side]: port.receive(None))  # type: ignore[misc]
            until_blocked(thread)
            ports[side].close()
            joined(thread)
            assert isinstance(outcome[0], PortClosed)

    @case("I7")
    def test_every_call_on_a_closed_port_says_so_or_does_nothing(self) -> None:
        """After `close`, `close` and `wake` do nothing, `state` says closed, `send` and `receive` raise PortClosed.

        If this fails: a late call meets a socket that is gone, or waits for one.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        pair.engine.send(peer, [b"unread"])
        for port in (frontend, pair.engine):
            assert (port.state.up, port.state.closed) == (True, False)
            port.close()
            port.close()
            port.wake()
            assert (port.state.up, port.state.closed) == (False, True)
            with pytest.raises(PortClosed):
                port.receive(0)
        with pytest.raises(PortClosed):
            frontend.send([b"x"])
        with pytest.raises(PortClosed):
            pair.engine.send(peer, [b"x"])

    @case("I7")
    def test_close_from_many_threads_among_senders_and_readers(self) -> None:
        """Ports that are closed by several threads at once, while others send and receive, end all of them with PortClosed.

        If this fails: `close` races with a call, and one of them hangs or raises something else.
        """
        for _ in range(5):
            pair = self.pair()
            peer, frontend = pair.frontend()

            def spam(send: Callable[[], None]) -> None:
                while True:
                    with contextlib.suppress(PortFull, PortDown):
                        send()

            work = [
                in_thread(lambda f=frontend: spam(lambda: f.send([b"x"]))),  # type: ignore[misc]
                in_thread(lambda e=pair.engine, p=peer: spam(lambda: e.send(p, [b"x"]))),  # type: ignore[misc]
                in_thread(lambda f=frontend: [f.receive(None) for _ in iter(int, 1)]),  # type: ignore[misc]
                in_thread(lambda e=pair.engine: [e.receive(None) for _ in iter(int, 1)]),  # type: ignore[misc]
            ]
            closers = [threading.Thread(target=port.close) for port in (frontend, pair.engine) * 3]
            for closer in closers:
                closer.start()
            for closer in closers:
                joined(closer)
            for thread, outcome in work:
                joined(thread)
                assert isinstance(outcome[0], PortClosed)

    @case("I2")
    def test_frames_taken_before_close_still_arrive(self) -> None:
        """What a port has taken is still sent when it is closed, within its own bound, to an end that reads.

        If this fails: the last words of an engine or a frontend are dropped.
        """
        pair = self.pair()
        _, frontend = pair.frontend()
        _send_and_close(frontend, frontend.send, pair.engine)
        peer, other = pair.frontend()
        _send_and_close(pair.engine, pair.to(peer), other)


def _send_and_close(port: Port, send: Callable[[Frame], None], end: Port) -> None:
    """More than sockets hold, so that the port has some of it left when it is closed."""
    count, body = 48, bytes(65_536)
    thread, outcome = in_thread(lambda: received(end, count, ARRIVES_S / 2))
    for number in range(count):
        until_taken(partial(send, [b"%d" % number, body]))
    port.close()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    check_same([number for number, _ in outcome[0]], [b"%d" % number for number in range(count)])
