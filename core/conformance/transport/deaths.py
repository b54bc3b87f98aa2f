"""The death of an engine: every frontend hears of it, with its cause, after what had arrived; and the next one is unharmed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.faults import EngineProcess
from tllm_core.conformance.transport.streams import ask, check, check_tokens
from tllm_core.conformance.transport.subject import EXIT, FAULTS, LONG, PATIENCE_S, TransportSubject
from tllm_core.contracts.interfaces import Capability
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import EngineDeadError, EngineStartError
from tllm_core.executor import GenerationExecutor

STREAM = SamplingParams(max_tokens=LONG)
SHARED = Capability.CROSS_PROCESS | Capability.MANY_FRONTENDS


class DeathCases(TransportSubject):
    """Nobody waits for an engine that is gone."""

    def _all_hear(
        self, world: EngineProcess, strike: Callable[[], object], words: str, frontends: Sequence[GenerationExecutor]
    ) -> None:
        """Every pending result of all frontends raises, after an exact prefix; and so do later submits."""
        results = [
            (frontend, frontend.generate_async([number + 1, 6], STREAM))
            for frontend in frontends
            for number in range(8)
        ]
        for _, result in results:
            next(result)
        struck = strike()  # a result that nobody holds is aborted
        for _, result in results:
            with pytest.raises(EngineDeadError, match=words):
                result.result(PATIENCE_S)
            tokens = result.outputs[0].token_ids
            check_tokens(tokens, result.prompt_token_ids)
        del struck
        for frontend in frontends:
            with pytest.raises(EngineDeadError):
                frontend.generate_async([1], STREAM)
            with pytest.raises(EngineDeadError):
                frontend.stats()

    def _frontends(self, world: EngineProcess) -> list[GenerationExecutor]:
        return [world.owner, *([world.attach()] if self.claims(SHARED) else [])]

    @case("I1", "I4", "I12", needs=Capability.CROSS_PROCESS, timeout_s=60.0)
    def test_a_killed_engine_is_told_to_all(self) -> None:
        """SIGKILL for rank 0: every pending stream and later call of every frontend raises EngineDeadError, which names it.

        If this fails: an obituary does not get through, or is taken for one request's error.
        """
        world = self.start()
        self._all_hear(world, world.kill, "SIGKILL", self._frontends(world))

    @case("I4", "I12", needs=SHARED, timeout_s=60.0)
    def test_a_world_that_freezes_as_a_whole_is_noticed_by_its_silence(self) -> None:
        """SIGSTOP for all of its processes: a frontend that has only its lane hears EngineDeadError after `dead_after_s`.

        If this fails: an open connection is taken for a living engine.
        """
        world = self.start(liveness__dead_after_s=1.5)
        frontend = world.attach()
        self._all_hear(world, lambda: world.freeze(whole=True), ".", [frontend])

    @case("I4", "I12", needs=Capability.CROSS_PROCESS, timeout_s=60.0)
    def test_a_rank_that_stops_is_noticed_and_named(self) -> None:
        """SIGSTOP for rank 0 alone: every frontend hears EngineDeadError, which names the rank.

        If this fails: the watcher's beats do not travel, or are delivered late and all at once.
        """
        world = self.start(liveness__dead_after_s=1.5)
        self._all_hear(world, world.freeze, "rank 0", self._frontends(world))

    @case("I4", needs=Capability.CROSS_PROCESS, timeout_s=60.0)
    def test_an_exit_with_code_0_is_a_death(self) -> None:
        """A rank 0 that exits with code 0 although nobody told it to is as dead as any other.

        If this fails: a clean end of a connection is taken for an orderly stop.
        """
        world = self.start({"faults": FAULTS})
        self._all_hear(
            world, lambda: world.owner.generate_async([EXIT], STREAM), "exited with code 0", self._frontends(world)
        )

    @case("I4", "I7", needs=SHARED, timeout_s=60.0)
    def test_the_owners_shutdown_is_told_to_attached_frontends(self) -> None:
        """When the owner stops the engine in an orderly way, attached frontends hear that it was stopped.

        If this fails: the last frames before an orderly close are lost.
        """
        world = self.start()
        self._all_hear(world, lambda: world.owner.shutdown(20.0), "stopped", [world.attach()])

    @case("I4", "I12")
    def test_a_death_during_start_is_told_with_its_cause(self) -> None:
        """An engine that raises while it starts makes `create` raise EngineStartError with its own words; nothing stays.

        If this fails: a port that was bound for an engine that never got ready keeps something alive.
        """
        faults: list[dict[str, Any]] = [{"at": "start", "do": "raise", "message": "no weights"}]
        with pytest.raises(EngineStartError, match="no weights"):
            self.start({"faults": faults})
        if self.claims(Capability.CROSS_PROCESS):
            with pytest.raises(EngineStartError, match="SIGKILL"):
                self.start({"faults": [{"at": "start", "do": "kill"}]})

    @case("I4", "I9", needs=Capability.CROSS_PROCESS, timeout_s=60.0)
    def test_a_thawed_old_generation_changes_nothing_for_the_next(self) -> None:
        """A world that was frozen, given up and thawed again sends its old frames; the next generation's streams are exact.

        If this fails: frames of another generation are delivered.
        """
        with ThreadPoolExecutor(2) as pool:
            old, new = pool.map(lambda after: self.start(liveness__dead_after_s=after), (1.5, 10.0))
        stale = old.owner.generate_async([1, 1], STREAM)
        next(stale)
        old.freeze(whole=True)
        with pytest.raises(EngineDeadError):
            stale.result(PATIENCE_S)
        fresh = new.owner.generate_async([2, 2], SamplingParams(max_tokens=600))
        next(fresh)
        old.thaw()
        check(fresh, 600)
        ask(new.owner, [3, 3])
        with contextlib.suppress(EngineDeadError):
            old.owner.abort(stale.client_id)
        assert new.owner.check_health()
