"""Transports that move frames wrongly, or take what they should refuse; one fault each."""

from __future__ import annotations

import time

from msgspec import structs

from tests.mutants import caught_by
from tests.mutants.altered_ports import Altered
from tllm_core.errors import PortDown, PortFull
from tllm_core.transports import inproc
from tllm_core.transports.inproc import Inbox, InprocTransport
from tllm_core.transports.zmq import ZmqTransport


@caught_by("TestInproc", "test_frames_arrive_in_order_and_once", r"\[b'1999'\] at place 0")
class Reorders(Altered, InprocTransport):
    """What waits is handed out last one first."""

    def alter(self, port):
        receive = port.receive
        port.receive = lambda timeout: receive(timeout)[::-1]


@caught_by("TestInproc", "test_frames_arrive_in_order_and_once", r"\[b'0'\] at place 1")
class Repeats(Altered, InprocTransport):
    """Every frame that comes together with others comes twice."""

    def alter(self, port):
        receive = port.receive

        def twice(timeout):
            frames = receive(timeout)
            return [frame for frame in frames for _ in (0, 1)] if len(frames) > 1 else frames

        port.receive = twice


@caught_by("TestInproc", "test_frames_cross_both_ways_with_their_buffers_kept_apart", "head")
class JoinsBuffers(Altered, InprocTransport):
    """The buffers of a frame become one."""

    def alter(self, port):
        receive = port.receive
        port.receive = lambda timeout: [[b"".join(frame)] for frame in receive(timeout)]


@caught_by("TestZmqIpc", "test_large_frames_keep_their_place_among_small_ones", "at place 1 instead of")
class CutsLargeFrames(Altered, ZmqTransport):
    """Of a large buffer only the first 64 KiB travel."""

    def alter(self, port):
        send = port._send
        port._send = lambda frame, to: send([part[: 1 << 16] for part in frame], to)


@caught_by("TestInproc", "test_large_frames_keep_their_place_among_small_ones", r"\[b'3'\] at place 1")
class LargeFramesComeLate(Altered, InprocTransport):
    """Large frames go another way, which takes longer."""

    def alter(self, port):
        receive = port.receive
        port.receive = lambda timeout: sorted(receive(timeout), key=lambda frame: sum(map(len, frame)) > 1 << 16)


@caught_by("TestInproc", "test_sixteen_threads_send_at_once", "frames came|at place ")
class SendsWithoutALock(Altered, InprocTransport):
    """Two threads that send at once put one frame where both should be."""

    class inbox(Inbox):  # noqa: N801
        __slots__ = ()

        def put(self, frame):
            frames = list(self._frames)
            time.sleep(0)  # where a thread may be interrupted
            with self._ready:
                self._frames = [*frames, frame]
                self._ready.notify()


@caught_by("TestInproc", "test_each_of_many_frontends_gets_its_own_frames", "of 50, .* instead of")
class ReachesTheWrongPeer(Altered, InprocTransport):
    """The engine's frames go to whoever connected first."""

    def alter_engine(self, port):
        send = port.send
        port.send = lambda to, frame: send(next(iter(port._frontends)), frame)


@caught_by("TestInproc", "test_frontends_may_send_before_the_engine_reads", "of 5 frames came")
class HearsOnlyWhileItListens(Altered, InprocTransport):
    """What was sent before the engine's first `receive` is lost."""

    def alter_engine(self, port):
        receive, begun = port.receive, []

        def receive_after(timeout):
            if not begun:
                begun.append(receive(0))
            return receive(timeout)

        port.receive = receive_after


@caught_by("TestInproc", "test_odd_frames_of_one_peer_harm_no_other", "of 5 frames came")
class DropsEmptyBuffers(Altered, InprocTransport):
    """A frame of one empty buffer is taken, and never arrives."""

    def alter_frontend(self, port):
        send = port.send
        port.send = lambda frame: send(frame) if any(map(len, frame)) else None


@caught_by("TestInproc", "test_a_frame_beyond_max_frame_is_refused_alone", "a frame of 1025 bytes was taken")
class TakesMoreThanItSays(Altered, InprocTransport):
    """`max_frame` is declared and not looked at."""

    def alter(self, port):
        port.max_frame = 1024


@caught_by("TestInproc", "test_frames_of_an_old_generation_reach_no_new_one", "late")
class ForgetsTheGeneration(InprocTransport):
    """Engines and frontends meet by the engine's name alone."""

    def listen(self, engine, generation):
        port = super().listen(engine, 0)
        port.address = structs.replace(port.address, generation=generation)
        return port

    def connect(self, engine, peer):
        return super().connect(structs.replace(engine, generation=0), peer)


# -------------------------------------------------------------------------------------------------------- full and down


@caught_by(
    "TestInproc", "test_a_receiver_that_does_not_read_holds_its_senders_back", "10000 frames of 65536 bytes were taken"
)
class HasNoBound(InprocTransport):
    """A queue that grows for as long as nobody reads: PortFull is never raised."""

    def __init__(self, settings):
        super().__init__(structs.replace(settings, queue_frames=1 << 20))


@caught_by("TestInproc", "test_a_receiver_that_does_not_read_holds_its_senders_back", "16 of 17 frames came")
class DropsWhenFull(Altered, InprocTransport):
    """The first frame that finds the queue full is dropped without a word."""

    class inbox(Inbox):  # noqa: N801
        __slots__ = ()

        def put(self, frame):
            if len(self._frames) == self._capacity and frame[0] == b"%d" % self._capacity:
                return
            super().put(frame)


@caught_by("TestInproc", "test_a_receiver_that_does_not_read_holds_its_senders_back", "s to refuse a frame")
class BlocksInSend(Altered, InprocTransport):
    """`send` waits a while for room before it says that there is none."""

    def alter_frontend(self, port):
        send = port.send

        def patiently(frame):
            try:
                send(frame)
            except PortFull:
                time.sleep(3.0)
                send(frame)

        port.send = patiently


@caught_by(
    "TestInproc", "test_a_receiver_that_does_not_read_holds_its_senders_back", "a full queue stopped another peer"
)
class OneQueueForAll(Altered, InprocTransport):
    """A frontend that does not read fills the queue of all."""

    def alter_engine(self, port):
        send = port.send

        def send_with_the_others(to, frame):
            if any(len(inbox._frames) >= inbox._capacity for inbox in port._frontends.values()):
                raise PortFull("the queue is full")
            send(to, frame)

        port.send = send_with_the_others


@caught_by("TestInproc", "test_an_unknown_peer_is_port_down", "DID NOT RAISE")
class TakesFramesForNobody(Altered, InprocTransport):
    """What is sent to a peer that nobody knows is dropped."""

    def alter_engine(self, port):
        send = port.send
        port.send = lambda to, frame: send(to, frame) if to in port._frontends else None


@caught_by("TestInproc", "test_a_frontend_that_left_becomes_port_down", "DID NOT RAISE")
class RemembersWhoLeft(Altered, InprocTransport):
    """What is sent to a frontend that has closed is taken for ever."""

    def alter_engine(self, port):
        send, known = port.send, set()

        def send_or_keep(to, frame):
            try:
                send(to, frame)
            except PortDown:
                if to not in known:
                    raise

        def receive_and_remember(timeout):
            known.update(port._frontends)
            return receive(timeout)

        receive, port.receive, port.send = port.receive, receive_and_remember, send_or_keep


@caught_by("TestInproc", "test_a_name_is_refused_while_its_holder_lives", "DID NOT RAISE")
class LetsTwoHoldAName(InprocTransport):
    """A second engine takes the name of one that lives."""

    def listen(self, engine, generation):
        inproc._meetings._listening.pop(engine, None)
        return super().listen(engine, generation)
