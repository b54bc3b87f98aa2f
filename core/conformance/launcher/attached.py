"""Frontends that attach to a world which somebody else started: they hear all of it, and end none of it."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tllm_core.attach import read_attach_file
from tllm_core.config import load_settings
from tllm_core.conformance.case import case
from tllm_core.conformance.faults import EngineProcess
from tllm_core.conformance.launcher.subject import SHUTDOWN_S, LauncherSuite
from tllm_core.conformance.launcher.watched import PATIENCE_S, Watched
from tllm_core.contracts.interfaces import Beaten, Exited, Failed
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import EngineDeadError
from tllm_core.plan import Plan
from tllm_core.world.process import is_alive, wait_gone

STREAM = SamplingParams(max_tokens=100_000)
PACE = {"step_interval_s": 0.005, "max_seq_len": 200_000}
OPEN_S = 20.0
POLL_S = 0.2
"""An attached world's beats are returned with the next call; they end none that waits."""


class AttachCases(LauncherSuite):
    """Skipped for a launcher whose worlds nobody can attach to."""

    @case("I4", "I5", timeout_s=60.0)
    def test_an_attached_frontend_leaves_and_the_world_stays(self) -> None:
        """An attached frontend's shutdown ends its own requests alone: the owner's stream goes on, and others can attach.

        If this fails: whoever leaves stops the engine of everybody.
        """
        started = self._start()
        stream = started.owner.generate_async([5, 6], STREAM)
        next(stream)
        attached = started.attach()
        own = attached.generate_async([1, 2], SamplingParams(max_tokens=5)).result(PATIENCE_S)
        assert len(own.outputs[0].token_ids) == 5
        attached.shutdown(SHUTDOWN_S)
        assert all(is_alive(process) for process in started.processes), "the world ended with a frontend of it"
        next(stream)
        other = started.attach().generate_async([1, 2], SamplingParams(max_tokens=5)).result(PATIENCE_S)
        assert list(other.outputs[0].token_ids) == list(own.outputs[0].token_ids)

    @case("I4", "I12", timeout_s=90.0)
    def test_the_death_of_any_rank_reaches_those_that_attached(self) -> None:
        """SIGKILL for any rank: streams of owner and attached frontend raise EngineDeadError, and both name rank and signal.

        If this fails: only who started the world hears how it ended.
        """
        for victim in range(self.ranks):
            started = self._start(world_size=self.ranks)
            frontends = (started.owner, started.attach())
            streams = [frontend.generate_async([3, 4], STREAM) for frontend in frontends]
            for stream in streams:
                next(stream)
            os.kill(started.processes[victim].pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError) as caught:
                    stream.result(PATIENCE_S)
                assert caught.value.root_cause.rank == victim, caught.value.root_cause
                assert "SIGKILL" in str(caught.value)

    @case("I4", "I12", timeout_s=60.0)
    def test_a_world_that_ends_without_a_word_is_noticed(self) -> None:
        """SIGKILL for every process of the world at once: what an attached frontend waits for raises EngineDeadError.

        If this fails: those who attached wait for an obituary that nobody is left to write.
        """
        started = self._start(dead_after_s=2.0)
        stream = started.attach().generate_async([3, 4], STREAM)
        next(stream)
        started.freeze(whole=True)  # so that the last of them tells nothing of the first
        started.end()
        with pytest.raises(EngineDeadError):
            stream.result(PATIENCE_S)

    @case("I7", timeout_s=60.0)
    def test_an_orderly_stop_is_told_to_those_that_attached(self) -> None:
        """The owner's shutdown ends the streams of an attached frontend at once, and its world says Exited, clean.

        If this fails: an orderly stop is noticed by its silence, or is told as a crash.
        """
        started = self._start()
        seen = self._attached_world(started)
        stream = started.attach().generate_async([3, 4], STREAM)
        next(stream)
        started.owner.shutdown(SHUTDOWN_S)
        with pytest.raises(EngineDeadError):
            stream.result(PATIENCE_S)
        assert seen.until(Exited).clean, seen.seen
        assert not seen.of(Failed)
        assert list(seen.world.events(None)) == [], "something came after Exited"

    @case("I7", "I12", timeout_s=60.0)
    def test_an_attached_world_is_watched_and_not_owned(self) -> None:
        """It is not owned, beats reach it, and `stop` and `kill` end its own side alone, also where `events` is waiting.

        If this fails: somebody who only looks at a world can end it.
        """
        started = self._start()
        seen = self._attached_world(started)
        assert not seen.world.owned
        first = seen.until(Beaten).beat.number
        assert seen.until(Beaten).beat.number > first
        assert seen.world.stop(1.0)
        seen.world.kill()
        seen.until(Exited)
        assert all(is_alive(process) for process in started.processes)
        assert started.owner.check_health()

    @case("I12", timeout_s=60.0)
    def test_an_attached_world_tells_of_a_death_once(self) -> None:
        """After SIGKILL for a rank its attached world says Failed, with rank and signal, then Exited, not clean, then nothing.

        If this fails: an attached frontend ends without a cause.
        """
        started = self._start()
        seen = self._attached_world(started)
        processes = started.processes
        started.kill()
        failed = seen.until(Failed)
        assert "SIGKILL" in failed.message or "gone" in failed.message, failed
        assert not seen.until(Exited).clean
        assert list(seen.world.events(None)) == [], "something came after Exited"
        assert wait_gone(processes, PATIENCE_S)

    # ---------------------------------------------------------------------------------------------------- its worlds

    def _start(self, dead_after_s: float = 10.0, **engine: Any) -> EngineProcess:
        self.need_processes()
        settings = load_settings(
            None,
            overrides={
                "engine.name": "echo",
                "engine.options": {**PACE, **engine},
                "transport.name": self.transport_name,
                "transport.options": dict(self.transport_options),
                "launcher.name": self.reference,
                "launcher.options": dict(self.settings),
                "liveness.dead_after_s": dead_after_s,
            },
        )
        started = self.open.enter_context(EngineProcess(settings))
        self.endings.append(started.end)
        if started._ticket is None:
            pytest.skip(f"nobody can attach to the worlds of {self.subject}")
        return started

    def _attached_world(self, started: EngineProcess) -> Watched:
        """The world as an attached frontend has it, its lanes closed at the end of the case."""
        with tempfile.TemporaryDirectory(prefix="tllm-") as directory:
            path = Path(directory, "engine.json")
            started.owner.write_attach_file(path)
            content = read_attach_file(path)
        settings = started.settings
        attachment = Plan.to_attach(settings, content).attach(content, settings, OPEN_S)
        self.open.callback(attachment.link.close)
        world = attachment.world
        if world is None:
            pytest.skip(f"{self.subject} has no watcher that could be heard")
        self.open.callback(world.kill)
        return Watched(world, poll_s=POLL_S)
