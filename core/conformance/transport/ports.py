"""Frames between two ports: whole, in order, once, to whom they are for; and how receive and wake behave."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tllm_core.conformance.case import case
from tllm_core.conformance.sequences import check_same
from tllm_core.conformance.transport.pair import (
    in_thread,
    joined,
    new_peer,
    plain,
    received,
    until_blocked,
    until_taken,
)
from tllm_core.conformance.transport.subject import PATIENCE_S, TransportSubject
from tllm_core.errors import FrameTooLarge, PortFull

LARGE = (1 << 20) + 1
SLEPT_S = 10.0
"""A `receive` that lasts as long has missed what should have ended it."""


class PortCases(TransportSubject):
    """What ports promise while nothing goes wrong."""

    @case("I2")
    def test_frames_cross_both_ways_with_their_buffers_kept_apart(self) -> None:
        """A frame of several buffers, an empty one among them, arrives as the same buffers in both directions.

        If this fails: buffers are joined, split or dropped on the way, or a memoryview is not taken for bytes.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        frame = [b"head", memoryview(b"\0\1\2"), b"", b"tail" * 100]
        frontend.send(frame)
        pair.engine.send(peer, frame)
        assert received(pair.engine) == plain([frame])
        assert received(frontend) == plain([frame])

    @case("I2")
    def test_frames_arrive_in_order_and_once(self) -> None:
        """2000 frames each way arrive in the order in which they were sent, each of them once.

        If this fails: frames are lost, repeated or reordered while nothing goes wrong.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        sent = [[str(number).encode()] for number in range(2000)]
        for frame in sent:
            frontend.send(frame)
            pair.engine.send(peer, frame)
        check_same(received(pair.engine, len(sent)), sent)
        check_same(received(frontend, len(sent)), sent)

    @case("I2")
    def test_large_frames_keep_their_place_among_small_ones(self) -> None:
        """A frame of 1 MiB and a byte, or of `max_frame` where that is less, arrives whole and in its place.

        If this fails: `max_frame` says more than fits, or large frames go another way than small ones.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        room = LARGE if pair.engine.max_frame is None else min(LARGE, pair.engine.max_frame - 1)
        frames = [[b"1"], [b"2", secrets.token_bytes(room)], [b"3"]]
        for frame in frames:
            pair.engine.send(peer, frame)
            frontend.send(frame)
        check_same(received(frontend, 3), frames)
        check_same(received(pair.engine, 3), frames)

    @case("I2")
    def test_a_frame_beyond_max_frame_is_refused_alone(self) -> None:
        """A frame of more than `max_frame` bytes raises FrameTooLarge, and the port goes on.

        If this fails: `max_frame` is not enforced, so that a peer or a broker breaks the connection instead.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        for port, send, reader in ((frontend, frontend.send, pair.engine), (pair.engine, pair.to(peer), frontend)):
            if port.max_frame is None:
                continue
            for _ in range(2):
                refused = False
                try:
                    send([b"x", bytes(port.max_frame)])
                except FrameTooLarge:
                    refused = True
                assert refused, f"a frame of {port.max_frame + 1} bytes was taken"
            send([b"small"])
            assert received(reader) == [[b"small"]]

    @case("I2")
    def test_sixteen_threads_send_at_once(self) -> None:
        """Frames of many threads at one port are neither lost nor mixed, and keep the order of each thread.

        If this fails: `send` is not thread-safe.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()

        def send(port_send: Callable[[Any], None], sender: int) -> None:
            for number in range(200):
                frame = [b"%d" % sender, b"%d" % number, b"x" * (number * 400)]
                until_taken(lambda frame=frame: port_send(frame))  # type: ignore[misc]

        threads = [threading.Thread(target=send, args=(frontend.send, sender)) for sender in range(16)]
        threads += [threading.Thread(target=send, args=(pair.to(peer), sender)) for sender in range(4)]
        for thread in threads:
            thread.start()
        for port, senders in ((pair.engine, 16), (frontend, 4)):
            got = defaultdict(list)
            for sender, number, filling in received(port, senders * 200):
                assert len(filling) == int(number) * 400
                got[int(sender)].append(int(number))
            for sender_id in range(senders):
                check_same(got[sender_id], list(range(200)))
        for thread in threads:
            joined(thread)

    @case("I2")
    def test_the_first_frames_of_a_frontend_and_to_it_are_not_lost(self) -> None:
        """What a frontend sends first, and what it is answered at once, arrives, 20 times in a row.

        If this fails: a port says that it is up before the other end can be reached.
        """
        for _ in range(20):
            pair = self.pair()
            peer, frontend = pair.frontend()
            pair.engine.send(peer, [b"first"])
            assert received(frontend) == [[b"first"]]
            pair.close()

    @case("I2")
    def test_frontends_may_send_before_the_engine_reads(self) -> None:
        """What frontends send before the engine has ever called `receive` arrives.

        If this fails: the engine's port takes frames only while somebody waits for them.
        """
        pair = self.pair()
        count = 5
        for number in range(count):
            peer = new_peer()
            pair.frontends[peer] = pair.transport.connect(pair.engine.address, peer)
            pair.frontends[peer].send([b"%d" % number])
        check_same(sorted(received(pair.engine, count)), [[b"%d" % number] for number in range(count)])

    # ---------------------------------------------------------------------------------------------- waiting, waking

    @case("I7")
    def test_receive_returns_nothing_after_its_timeout(self) -> None:
        """`receive` waits for as long as it was told, and then returns [].

        If this fails: it returns early, blocks, or raises for want of frames.
        """
        pair = self.pair()
        _, frontend = pair.frontend()
        for port in (pair.engine, frontend):
            started = time.monotonic()
            assert list(port.receive(0.02)) == []
            assert time.monotonic() - started >= 0.019
            assert list(port.receive(0)) == []

    @case("I7")
    def test_a_blocked_receive_is_ended_by_a_frame(self) -> None:
        """A frame ends a `receive` that waits, also while the same port sends all the time.

        If this fails: readers sleep through what arrives, or a sender keeps them from it.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        for number in range(30):
            thread, outcome = in_thread(lambda: frontend.receive(PATIENCE_S))
            pair.engine.send(peer, [b"%d" % number])
            sent_at = time.monotonic()
            while not outcome:
                assert time.monotonic() - sent_at < SLEPT_S, f"frame {number} was slept through"
                with contextlib.suppress(PortFull):
                    frontend.send([b"noise"])
                pair.engine.receive(0)
            joined(thread)
            assert plain(outcome[0]) == [[b"%d" % number]]

    @case("I7")
    def test_wake_ends_one_blocked_receive(self) -> None:
        """`wake` ends a `receive` that waits without end.

        If this fails: an executor's receive thread would not hear of a verdict, a deadline or its own end.
        """
        pair = self.pair()
        _, frontend = pair.frontend()
        for port in (pair.engine, frontend):
            thread, outcome = in_thread(lambda port=port: port.receive(None))  # type: ignore[misc]
            until_blocked(thread)
            port.wake()
            joined(thread)
            assert [list(frames) for frames in outcome] == [[]]

    @case("I7")
    def test_wake_before_receive_ends_the_next_one_and_only_that(self) -> None:
        """A `wake` that comes first is kept for the next `receive`; two of them count as one.

        If this fails: wakes get lost between two calls, or pile up.
        """
        pair = self.pair()
        _, frontend = pair.frontend()
        for port in (pair.engine, frontend):
            port.wake()
            port.wake()
            started = time.monotonic()
            assert list(port.receive(SLEPT_S)) == []
            assert time.monotonic() - started < SLEPT_S, "a wake that came before receive was slept through"
            started = time.monotonic()
            assert list(port.receive(0.02)) == []
            assert time.monotonic() - started >= 0.019

    @case("I2", "I7")
    def test_wakes_and_frames_from_many_threads_are_never_missed(self) -> None:
        """500 frames with a `wake` after each all arrive, in order, and the last `wake` is not slept through.

        If this fails: a wake-up is cleared together with one that came later.
        """
        pair = self.pair()
        peer, frontend = pair.frontend()
        told = threading.Event()

        def poke() -> None:
            for number in range(500):
                pair.engine.send(peer, [b"%d" % number])
                frontend.wake()
            told.set()
            frontend.wake()

        thread = threading.Thread(target=poke)
        thread.start()
        frames: list[bytes] = []
        while not (told.is_set() and len(frames) >= 500):
            started = time.monotonic()
            frames += [bytes(frame[0]) for frame in frontend.receive(SLEPT_S)]
            assert time.monotonic() - started < SLEPT_S, f"slept through a wake or a frame, after {len(frames)} frames"
        joined(thread)
        check_same(frames, [b"%d" % number for number in range(500)])
