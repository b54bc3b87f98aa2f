"""Cases: start and close, in every state."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.driven import Driven
from tllm_core.conformance.engine.subject import EngineSuite, check_words, need
from tllm_core.contracts.interfaces import Phase

GONE_S = 10.0
"""How long threads and processes may take to end after close."""
SLACK_FDS = 4


class StopStarting(Exception):
    """What a world that goes down meanwhile raises into `phase`."""


class CloseCases(EngineSuite):
    """Whatever happened before, `close` frees everything."""

    @case("I7", timeout_s=60)
    def test_close_before_start(self) -> None:
        """An engine that was made and not started can be closed, and nothing of it is left.

        If this fails: close() uses what only start() makes.
        """
        self._leaves_nothing(lambda: Driven(self.parts()))

    @case("I7", timeout_s=120)
    def test_close_of_an_idle_engine_twice(self) -> None:
        """A started engine that has served requests is closed, and closed again, and nothing of it is left.

        If this fails: a thread or process of the engine outlives close(), or close() is not idempotent.
        """

        def served() -> Driven:
            driven = self._started()
            driven.ask([(self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens))])
            driven.close()
            return driven

        self._leaves_nothing(served)

    @case("I7", timeout_s=120)
    def test_close_while_requests_run(self) -> None:
        """An engine can be closed while requests wait and run, and nothing of it is left.

        If this fails: close() waits for requests to end, or trips over them.
        """

        def busy() -> Driven:
            driven = self._started()
            for prompt in self.prompts_for(driven.info):
                driven.submit(prompt, driven.sampling(self.max_tokens))
            driven.advance()
            return driven

        self._leaves_nothing(busy)

    @case("I7", "I12", timeout_s=120)
    def test_a_start_that_is_ended_raises_and_leaves_nothing(self) -> None:
        """Where the world raises into `phase`, as it does when it goes down during start-up, start raises just that;
        close then frees what was made so far.

        If this fails: start() swallows what `phase` raises, or close() takes for granted that start() came to its end.
        """

        def ended() -> Driven:
            driven = Driven(self.parts(), on_phase=_stop_starting)
            try:
                driven.start()
            except StopStarting:
                return driven
            except BaseException:
                driven.leave()
                raise
            told = bool(driven.phases)
            driven.leave()
            assert not told, "phase raised during start, and start went on"
            need(False, "it reports no phase during start-up")
            return driven

        self._leaves_nothing(ended)

    @case("I5", "I7", timeout_s=120)
    def test_a_failed_start_raises_and_leaves_nothing(self) -> None:
        """With `bad_settings` making, preparing or starting the engine raises, with a message; close then frees what
        was made so far.

        If this fails: an engine that can't work says that it is ready, or what it had opened stays.
        """
        need(self.bad_settings is not None, "the suite names no `bad_settings` with which it can't start")

        def failed() -> Driven | None:
            try:
                driven = Driven(self.parts(self.bad_settings))
            except Exception as error:
                check_words(error, "a failed start")
                return None
            try:
                driven.start()
            except Exception as error:
                check_words(error, "a failed start")
                return driven
            driven.leave()
            raise AssertionError(f"it started with {self.bad_settings}")

        self._leaves_nothing(failed)

    def _started(self) -> Driven:
        driven = Driven(self.parts())
        self._start(driven)
        return driven

    def _leaves_nothing(self, live: Callable[[], Driven | None]) -> None:
        """One life first that is not looked at: what a process makes once, such as pools of libraries, is there then."""
        for watched in (False, True):
            before = Left.now()
            driven = live()
            if driven is not None:
                driven.leave()
            if watched:
                _until_gone(before)


class Left(Struct):
    """What an engine could leave in this process."""

    threads: set[int | None]
    children: set[int]
    descriptors: int

    @classmethod
    def now(cls) -> Left:
        return cls({thread.ident for thread in threading.enumerate()}, _children(), _descriptors())

    def beyond(self, before: Left) -> str:
        """What there is that was not before, in words; empty where there is nothing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found = [f"thread {names.get(ident)!r}" for ident in self.threads - before.threads]
        found += [f"process {pid}" for pid in self.children - before.children]
        if self.descriptors > before.descriptors + SLACK_FDS:
            found.append(f"{self.descriptors - before.descriptors} open descriptors")
        return ", ".join(found)


def _children() -> set[int]:
    """Processes that this one started and that were not waited for; none where the system does not tell."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, task.read_text().split()))
        except OSError:  # the thread has ended meanwhile
            continue
    return found


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _stop_starting(phase: Phase) -> None:
    raise StopStarting(f"the world goes down during {phase.name!r}")


def _until_gone(before: Left) -> None:
    deadline = time.monotonic() + GONE_S
    while left := Left.now().beyond(before):
        assert time.monotonic() < deadline, f"left behind {GONE_S:g} s after close: {left}"
        time.sleep(0.01)
