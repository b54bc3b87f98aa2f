"""The death of a world that runs, by any of its processes, and what its watcher tells of those that live."""

from __future__ import annotations

import os
import signal

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.launcher.subject import LauncherSuite, fault
from tllm_core.contracts.interfaces import Beaten, Exited, Failed
from tllm_core.contracts.messages import RankState, SamplingParams
from tllm_core.errors import EngineDeadError


class DeathCases(LauncherSuite):
    """Whoever dies is named, and takes the rest along."""

    @case("I12", timeout_s=90.0)
    def test_the_death_of_any_rank_is_the_worlds(self) -> None:
        """SIGKILL for any rank of a world that runs: Failed names the rank and the signal, Exited follows, and no rank is left.

        If this fails: only rank 0 is watched, or the others wait for one that is gone.
        """
        self.need_processes()
        for victim in range(self.ranks):
            world = self.launch(world_size=self.ranks)
            os.kill(world.ready().ranks[victim].pid, signal.SIGKILL)
            failed = world.until(Failed)
            assert (failed.rank, failed.exitcode) == (victim, -9), failed
            assert "SIGKILL" in failed.message
            exited = world.until(Exited)
            assert (exited.clean, exited.rank, exited.exitcode) == (False, victim, -9), exited
            world.check_gone()
            assert list(world.world.events(None)) == []

    @case("I12", timeout_s=60.0)
    def test_the_death_of_the_watcher_takes_the_ranks_along(self) -> None:
        """SIGKILL for the watcher: that is told as the world's death, and no rank outlives it.

        If this fails: ranks go on that nobody watches any more.
        """
        self.need_processes()
        world = self.launch()
        world.ready()
        os.kill(self.need_watcher(world), signal.SIGKILL)
        assert "SIGKILL" in world.until(Failed).message
        assert not world.until(Exited).clean
        world.check_gone()

    @case("I4", "I12", timeout_s=60.0)
    def test_an_exit_with_code_0_is_a_death(self) -> None:
        """A rank that exits with code 0 while nobody stops the world is dead: what waits for it raises EngineDeadError.

        If this fails: an end without an error code is taken for a wish.
        """
        self.need_processes()
        executor = self.executor(faults=fault("step", "exit", exitcode=0, after=2))
        with pytest.raises(EngineDeadError) as caught:
            executor.generate_async([1, 2, 3], SamplingParams(max_tokens=100)).result(30)
        cause = caught.value.root_cause
        assert (cause.rank, cause.exitcode) == (0, 0), cause

    @case("I4", "I5", timeout_s=60.0)
    def test_what_an_engine_raises_in_a_step_is_told(self) -> None:
        """An exception in a step ends the world, and what waits for it raises EngineDeadError with words and traceback.

        If this fails: the engine's thread or process ends, and its owner waits.
        """
        executor = self.executor(faults=fault("step", "raise", message="bad sum", after=2))
        with pytest.raises(EngineDeadError, match="bad sum") as caught:
            executor.generate_async([1, 2, 3], SamplingParams(max_tokens=100)).result(30)
        assert "Traceback" in (caught.value.root_cause.traceback or "")

    @case("I12", timeout_s=60.0)
    def test_beats_rise_and_tell_of_a_rank_that_stands_still(self) -> None:
        """A watcher's beats are numbered upwards; they show by its number a rank that is stopped, and that it runs again.

        If this fails: a freeze is noticed only by silence, or not at all.
        """
        self.need_processes()
        world = self.launch(world_size=self.ranks)
        last = world.ready().ranks[-1]
        self.need_watcher(world)
        running = (RankState.RUNNING,) * self.ranks
        os.kill(last.pid, signal.SIGSTOP)
        world.until(Beaten, lambda told: told.beat.states == (*running[:-1], RankState.STOPPED))
        os.kill(last.pid, signal.SIGCONT)
        world.until(Beaten, lambda told: told.beat.states == running)
        numbers = [told.beat.number for told in world.beats]
        assert numbers == sorted(set(numbers)), f"beats do not rise: {numbers}"
