"""Transports whose ports wait, wake and end wrongly, or leave something; one fault each."""

from __future__ import annotations

import os
import threading

from tests.mutants import caught_by
from tests.mutants.altered_ports import Altered
from tllm_core.contracts.interfaces import PORT_UP
from tllm_core.errors import PortClosed
from tllm_core.transports.inproc import Inbox, InprocTransport


@caught_by("TestInproc", "test_receive_returns_nothing_after_its_timeout", r"assert \(?[0-9.e-]+")
class ReturnsEarly(Altered, InprocTransport):
    """`receive` does not wait, so that its reader spins."""

    def alter(self, port):
        receive = port.receive
        port.receive = lambda timeout: receive(0)


@caught_by("TestInproc", "test_a_blocked_receive_is_ended_by_a_frame", "frame 0 was slept through")
class SleepsThroughFrames(Altered, InprocTransport):
    """A reader that waits is not told of what comes."""

    class inbox(Inbox):  # noqa: N801
        __slots__ = ()

        def put(self, frame):
            with self._ready:
                self._frames.append(frame)


@caught_by("TestInproc", "test_wake_ends_one_blocked_receive", "a call did not return")
class LosesWake(Altered, InprocTransport):
    """`wake` does nothing."""

    def alter(self, port):
        port.wake = lambda: None


@caught_by("TestInproc", "test_wake_before_receive_ends_the_next_one_and_only_that", "slept through")
class LosesAnEarlyWake(Altered, InprocTransport):
    """A frontend's `wake` counts only while somebody waits in `receive`."""

    def alter_frontend(self, port):
        receive = port.receive

        def receive_afresh(timeout):
            port._inbox._woken = False
            return receive(timeout)

        port.receive = receive_afresh


@caught_by("TestInproc", "test_wake_before_receive_ends_the_next_one_and_only_that", r"assert \(?[0-9.e-]+")
class CountsWakes(Altered, InprocTransport):
    """Each `wake` ends a `receive` of its own."""

    def alter(self, port):
        receive, wakes = port.receive, []

        def receive_counted(timeout):
            return receive(0 if wakes and wakes.pop() else timeout)

        port.receive = receive_counted
        port.wake = lambda: wakes.append(True)


@caught_by("TestInproc", "test_close_ends_a_blocked_receive", "a call did not return")
class SwallowsTheClose(Altered, InprocTransport):
    """`close` marks the port as closed, and does not tell the reader that waits."""

    class inbox(Inbox):  # noqa: N801
        __slots__ = ()

        def close(self):
            self._closed = True


@caught_by("TestInproc", "test_every_call_on_a_closed_port_says_so_or_does_nothing", "DID NOT RAISE")
class DeliversAfterTheClose(Altered, InprocTransport):
    """What had come before is still handed out once the port is closed."""

    class inbox(Inbox):  # noqa: N801
        __slots__ = ()

        def take(self, timeout):
            left, self._frames = self._frames, []
            return left or super().take(timeout)

        def close(self):
            left = self._frames
            super().close()
            self._frames = left


@caught_by(
    "TestInproc", "test_every_call_on_a_closed_port_says_so_or_does_nothing", r"\(True, False\) == \(False, True\)"
)
class NeverLooksClosed(InprocTransport):
    """A closed port says that it is up."""

    def listen(self, engine, generation):
        port = super().listen(engine, generation)
        port.__class__ = type("Port", (type(port),), {"state": property(lambda port: PORT_UP)})
        return port


@caught_by("TestInproc", "test_frames_taken_before_close_still_arrive", "47 of 48 frames came")
class DropsTheLastFrame(Altered, InprocTransport):
    """An engine's last frame is lost where it closes right after it."""

    def alter_engine(self, port):
        close = port.close

        def close_and_drop():
            for inbox in port._frontends.values():
                del inbox._frames[-1:]
            close()

        port.close = close_and_drop


@caught_by("TestInproc", "test_close_from_many_threads_among_senders_and_readers", "PortClosed")
class RaisesSomethingElse(Altered, InprocTransport):
    """A `send` that meets a close says that the port is down, and so does every later one."""

    def alter_frontend(self, port):
        send = port.send

        def send_or_down(frame):
            try:
                send(frame)
            except PortClosed:
                raise AttributeError("'NoneType' object has no attribute 'send'") from None

        port.send = send_or_down


# ------------------------------------------------------------------------------------------------------------- leavings


@caught_by("TestInproc", "test_nothing_is_left_behind", "no thread is left")
class LeavesAThread(Altered, InprocTransport):
    """Every frontend's port has a thread that outlives it."""

    def alter_frontend(self, port):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@caught_by("TestInproc", "test_nothing_is_left_behind", "no descriptor is left")
class LeavesADescriptor(Altered, InprocTransport):
    """Every port opens a pipe that nobody closes."""

    def alter(self, port):
        os.pipe()
