"""A start that fails: the cause is told whole, soon, and nothing is left of the world."""

from __future__ import annotations

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.launcher.subject import LauncherSuite, fault
from tllm_core.conformance.launcher.watched import Watched
from tllm_core.contracts.interfaces import Exited, Failed, Ready
from tllm_core.errors import EngineStartError


class FailureCases(LauncherSuite):
    """Failed with the cause, then Exited, then nothing."""

    @case("I5", "I12", timeout_s=90.0)
    def test_what_is_raised_while_starting_is_told_with_its_traceback(self) -> None:
        """What the engine's constructor, its `start` or its `prepare` raises reaches the owner: words, kind, traceback and rank.

        If this fails: a person is told that the engine died, and not why.
        """
        for at in ("construct", "start", "prepare"):
            failed = self._fails(self.launch(faults=fault(at, "raise", message=f"no card for {at}")))
            assert f"no card for {at}" in failed.message
            assert failed.kind == "RuntimeError"
            assert failed.rank == 0
            assert "Traceback (most recent call last)" in (failed.traceback or ""), failed

    @case("I12", timeout_s=90.0)
    def test_an_exit_while_loading_is_told_with_its_code(self) -> None:
        """A rank that calls `os._exit` while it loads, with any code and also 0, is a failed start that names rank and code.

        If this fails: the end of a process is noticed only where it says something first.
        """
        self.need_processes()
        for code in (3, 0):
            failed = self._fails(self.launch(faults=fault("start", "exit", exitcode=code)))
            assert (failed.rank, failed.exitcode) == (0, code), failed
            assert str(code) in failed.message

    @case("I12", timeout_s=90.0)
    def test_a_signal_while_loading_is_told_with_its_name_and_last_words(self) -> None:
        """A rank that is killed while it loads is a failed start that names the signal; what it wrote to stderr last is kept.

        If this fails: the out-of-memory killer, or a fault in native code, looks like a start that takes long.
        """
        self.need_processes()
        failed = self._fails(self.launch(faults=fault("start", "kill")))
        assert (failed.rank, failed.exitcode) == (0, -9), failed
        assert "SIGKILL" in failed.message
        failed = self._fails(self.launch(faults=fault("start", "kill", signal=11)))
        assert "SIGSEGV" in failed.message
        assert "Segmentation fault" in (failed.stderr_tail or ""), f"its stderr is lost: {failed}"

    @case("I12", timeout_s=60.0)
    def test_any_rank_that_fails_ends_the_others(self) -> None:
        """Where the last of several ranks fails to start, it is named, and no other rank stays.

        If this fails: ranks wait for each other for ever.
        """
        count = self.need_ranks()
        world = self.launch(world_size=count, faults=fault("start", "raise", rank=count - 1, message="no card"))
        failed = self._fails(world)
        assert failed.rank == count - 1
        assert "no card" in failed.message

    @case("I12", timeout_s=60.0)
    def test_a_start_that_takes_too_long_is_given_up(self) -> None:
        """A world that is not ready within the launcher's limit fails, with words on what it was doing, and is ended.

        If this fails: a start that hangs is waited for as long as nobody looks.
        """
        self.need_processes()
        world = self.launch(self.need_impatience(), load_delay_s=600)
        failed = self._fails(world)
        assert failed.message.strip()

    @case("I4", "I5", timeout_s=60.0)
    def test_an_executor_raises_the_cause(self) -> None:
        """`GenerationExecutor.create` over a world that does not start raises EngineStartError, which holds the cause.

        If this fails: Failed is told after Exited, or with other words than the engine's.
        """
        with pytest.raises(EngineStartError, match="no card") as caught:
            self.executor(faults=fault("start", "raise", message="no card"))
        assert "Traceback" in (caught.value.root_cause.traceback or "")

    def _fails(self, world: Watched) -> Failed:
        failed = world.until(Failed)
        assert not world.of(Ready), f"Ready, and then {failed}"
        assert not world.until(Exited).clean, "a start that failed is no clean end"
        world.check_gone()
        assert list(world.world.events(None)) == [], "something came after Exited"
        return failed
