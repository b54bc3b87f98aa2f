"""The end that an owner wants: orderly or at once, from any thread, in any state, and whole."""

from __future__ import annotations

import os
import signal
import threading
import time

from tllm_core.conformance.case import case
from tllm_core.conformance.launcher.subject import LauncherSuite
from tllm_core.conformance.launcher.watched import PATIENCE_S
from tllm_core.contracts.interfaces import Exited, Failed, Phase

STOP_S = 20.0
SHORT_S, SLACK_S = 0.3, 5.0
"""A bound that is too short for an end, and by how much it may be passed on a busy machine."""


class EndCases(LauncherSuite):
    """`stop`, `kill`, `wake`, and the last of the events."""

    @case("I7", timeout_s=60.0)
    def test_a_stop_is_clean_whole_and_repeatable(self) -> None:
        """`stop` returns True once the world is gone, and so does the next; Exited is clean, and nothing comes after it.

        If this fails: an end that was wanted is told as a death, or returns before it is one.
        """
        world = self.launch()
        world.ready()
        assert world.world.stop(STOP_S), f"it did not stop within {STOP_S:g} s"
        assert world.world.stop(STOP_S)
        world.check_gone()
        world.world.kill()
        exited = world.until(Exited)
        assert exited.clean, f"a stop is no death: {exited}"
        assert not world.of(Failed)
        assert list(world.world.events(None)) == [], "something came after Exited"

    @case("I7", timeout_s=60.0)
    def test_a_stop_does_not_wait_for_the_weights(self) -> None:
        """`stop` while the world loads ends it, and the end is clean.

        If this fails: whoever interrupts a long start waits for its end.
        """
        self.need_processes()
        world = self.launch(load_delay_s=600)
        world.until(Phase)
        assert world.world.stop(STOP_S), f"it did not stop within {STOP_S:g} s"
        assert world.until(Exited).clean

    @case("I7", timeout_s=60.0)
    def test_a_kill_right_after_the_launch_leaves_nothing(self) -> None:
        """`kill` before the world has said anything ends it; Exited is clean, and no process is left.

        If this fails: processes that are about to start are not known yet, and go on.
        """
        world = self.launch(world_size=1 if self.in_process() else self.ranks)
        world.world.kill()
        assert world.until(Exited).clean
        world.check_gone()

    @case("I7", timeout_s=60.0)
    def test_a_frozen_world_does_not_stop_but_can_be_killed(self) -> None:
        """A world whose rank, watcher, or all of it stands still: `stop` gives up after its bound with False, `kill` ends it.

        If this fails: an end waits for an answer that never comes.
        """
        self.need_processes()
        for whole in (False, True):
            world = self.launch()
            world.ready()
            for process in world.processes if whole else world.processes[:1]:
                os.kill(process.pid, signal.SIGSTOP)
            began = time.monotonic()
            assert not world.world.stop(SHORT_S), "it says that a world that stands still is gone"
            took = time.monotonic() - began
            assert took < SHORT_S + SLACK_S, f"stop took {took:.1f} s, and its bound was {SHORT_S:g} s"
            world.world.kill()
            world.check_gone()

    @case("I7", timeout_s=60.0)
    def test_kill_from_many_threads_ends_a_blocked_reader(self) -> None:
        """`kill` may be called by several threads at once while another waits in `events`, which then sees Exited.

        If this fails: the reader waits for ever, or a descriptor is closed under it.
        """
        world = self.launch()
        world.ready()
        reader = threading.Thread(target=world.until, args=(Exited,))
        killers = [threading.Thread(target=world.world.kill) for _ in range(4)]
        for thread in (reader, *killers):
            thread.start()
        for thread in (*killers, reader):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} still waits"
        assert world.of(Exited), "the reader ended without Exited"
        world.world.wake()

    @case("I7", "I8", timeout_s=90.0)
    def test_no_descriptor_is_left(self) -> None:
        """After worlds that were stopped and killed, no descriptor is open that was not before the first of them.

        If this fails: pipes or sockets to the world's processes are not closed.
        """
        self._life()
        before = _descriptors()
        for _ in range(2):
            self._life()
        deadline = time.monotonic() + PATIENCE_S
        while (left := _descriptors() - before) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"open after its worlds are gone: {left}"

    def _life(self) -> None:
        world = self.launch()
        world.ready()
        assert world.world.stop(STOP_S)
        world.world.kill()
        world.until(Exited)

    @case("I7", timeout_s=60.0)
    def test_wake_ends_a_wait_for_events(self) -> None:
        """`wake` ends an `events` call that waits without a limit; nothing is lost by it, and one after the end is quiet.

        If this fails: an owner can't leave a world that has nothing to say.
        """
        world = self.launch()
        world.ready()
        returned = threading.Event()

        def wait() -> None:
            while not stopped.is_set():
                world.world.events(None)
                returned.set()

        stopped = threading.Event()
        thread = threading.Thread(target=wait)
        thread.start()
        stopped.set()
        world.world.wake()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "events() did not return after wake()"
        assert returned.is_set()


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
