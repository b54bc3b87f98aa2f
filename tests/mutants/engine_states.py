"""Echo engines that step, start, close or answer control calls wrongly; one fault each."""

from __future__ import annotations

import threading
import time

from msgspec import Struct, structs

from tests.mutants import caught_by
from tests.mutants.altered_engines import Broken, BrokenSelfDriven
from tllm_core.contracts.interfaces import EngineCapability
from tllm_core.engines.echo.engine import EchoEngine

# ----------------------------------------------------------------------------------------------------------------- pace


@caught_by("TestEcho", "test_an_idle_engine_neither_waits_nor_works", "step waits for new work")
class WaitsForWork(Broken):
    """A step with nothing to do waits for a request to come."""

    def step(self):
        if not self._live:
            time.sleep(0.2)
        return super().step()


@caught_by("TestEcho", "test_an_idle_engine_neither_waits_nor_works", "a busy loop")
class SpinsWhileIdle(Broken):
    """Asks for another step when there is nothing to do."""

    def step(self):
        return structs.replace(super().step(), again=True)


@caught_by("TestEcho", "test_there_is_always_a_next_step_while_there_is_work", "the engine stalls")
class Stalls(Broken):
    """Says again=False with requests open, and calls no wake."""

    def step(self):
        step = super().step()
        return structs.replace(step, again=step.again and bool(self._waiting or len(self._live) > 1))


@caught_by("TestEcho", "test_stats_count_what_is_there_and_what_was_done", "generated tokens, and .* were delivered")
class CountsTooMuch(Broken):
    """`generated_tokens` has every token twice."""

    def stats(self):
        stats = super().stats()
        return structs.replace(stats, generated_tokens=2 * stats.generated_tokens)


@caught_by("TestEcho", "test_stats_count_what_is_there_and_what_was_done", "1 requests are open")
class CountsOnlyWhatRuns(Broken):
    """What waits is counted by nobody."""

    def stats(self):
        return structs.replace(super().stats(), waiting=0)


# ----------------------------------------------------------------------------------------------------- control and ends


@caught_by("TestEcho", "test_what_is_not_declared_is_refused", "is not declared, and returned")
class CallsAnything(Broken):
    """A control call reaches whatever method or attribute has its name."""

    def control(self, method, args, ranks):
        if hasattr(self, method):
            return [str(getattr(self, method))]
        return super().control(method, args, ranks)


@caught_by("TestEcho", "test_what_is_declared_answers_once_per_rank_or_says_why_not", "is no plain data")
class AnswersWithObjects(Broken):
    """A control call returns what can't cross to another process."""

    def control(self, method, args, ranks):
        return [Struct() for _ in super().control(method, args, ranks)]


@caught_by("TestEcho", "test_many_ranks_work_as_one_and_end_together", "of 2 ranks returned")
class AnswersForOneRank(Broken):
    """A control call for all ranks is answered by the first alone."""

    def control(self, method, args, ranks):
        return super().control(method, args, ranks)[:1]


@caught_by("TestEcho", "test_close_of_an_idle_engine_twice", "left behind .* thread")
class LeavesAThread(Broken):
    """A thread of its own outlives `close`."""

    def start(self, context):
        threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
        return super().start(context)


@caught_by("TestEcho", "test_close_while_requests_run", "close has not returned")
class WaitsForRequests(Broken):
    """`close` waits until every request has ended."""

    def close(self):
        while self._live:
            time.sleep(0.01)
        super().close()


@caught_by("TestEcho", "test_a_failed_start_raises_and_leaves_nothing", "it started with")
class SaysThatItIsReady(Broken):
    """A start that failed is told as one that went well."""

    def start(self, context):
        self._faults.points = frozenset()
        return super().start(context)


# -------------------------------------------------------------------------------------------------- a thread of its own


@caught_by("TestSelfDriven", "test_a_self_driven_engine_works_without_steps_and_asks_for_them", "no wake for")
class NeverWakes(BrokenSelfDriven):
    """What its thread has produced waits until somebody happens to ask."""

    def start(self, context):
        context.wake = lambda: None
        return super().start(context)


@caught_by(
    "TestSelfDriven", "test_an_abort_in_any_phase_delivers_nothing_more_and_frees_everything", "still delivers for it"
)
class KeepsOutputsOfTheAborted(BrokenSelfDriven):
    """What an aborted request had produced already is still fetched."""

    def abort(self, request_id):
        with self.changed:
            self.echo.abort(request_id)


@caught_by(
    "TestSelfDriven",
    "test_a_start_that_is_ended_raises_and_leaves_nothing",
    "phase raised during start",
)
class StartsWhateverIsRaised(BrokenSelfDriven):
    """What `phase` raises where the world goes down is taken for a nuisance."""

    def start(self, context):
        phase = context.phase

        def quietly(name, done=None):
            try:
                phase(name, done)
            except Exception:
                return

        context.phase = quietly
        return super().start(context)


@caught_by("TestEcho", "test_a_self_driven_engine_works_without_steps_and_asks_for_them", "no wake for")
class ClaimsToDriveItself(Broken):
    """Claims SELF_DRIVEN, and works only in `step`."""

    capabilities = EchoEngine.capabilities | EngineCapability.SELF_DRIVEN
