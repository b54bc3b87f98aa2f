"""Cases: when an engine wants its next step, what it says of itself, and that it does not grow."""

from __future__ import annotations

import gc
import sys
import time

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.answers import Answer
from tllm_core.conformance.engine.driven import STALL_S, Driven
from tllm_core.conformance.engine.subject import EngineSuite, need
from tllm_core.contracts.interfaces import Engine, EngineCapability

QUIET_S = 0.3
"""How long an idle engine is listened to."""
IDLE_WAKES = 8
IDLE_STEPS, IDLE_STEPS_S = 50, 5.0
"""Microseconds each, if step does not wait: this is a thousand times as much."""
PROOF_S = 1.0
"""How long an engine that does not claim to be self-driven is given to show that it is."""
ROUNDS, PER_ROUND, AT_ONCE = 6, 1000, 50
"""Bounded buffers fill in the first rounds; what grows in every one has no bound."""
ENOUGH_S = 8.0
"""After which a round ends, where the engine is slow."""
BLOCKS_PER_REQUEST = 0.5
"""Of Python's allocator. Less than one object that is kept per request."""


class PaceCases(EngineSuite):
    """`step`, `again`, `wake` and `stats`."""

    @case("I12", timeout_s=60)
    def test_an_idle_engine_neither_waits_nor_works(self) -> None:
        """With nothing to do, step returns at once, empty and with again=False, and nobody calls wake; before the first
        request and after the last.

        If this fails: step waits for new work, which keeps aborts and control calls out; or the rank spins while it is
        idle.
        """
        driven = self.driven()
        self._check_quiet(driven)
        driven.ask([(self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens))])
        driven.settle()
        self._check_quiet(driven)

    def _check_quiet(self, driven: Driven) -> None:
        driven.settle()
        step = driven.step()
        assert not step.outputs, "outputs, and no request is open"
        assert step.again is False, f"again is {step.again!r}, and there is nothing to do"
        began = time.monotonic()
        for _ in range(IDLE_STEPS):
            driven.step()
        took = time.monotonic() - began
        assert took < IDLE_STEPS_S, f"{IDLE_STEPS} steps with nothing to do took {took:.1f} s: step waits for new work"
        before = driven.bell.count
        time.sleep(QUIET_S)
        assert driven.bell.count - before <= IDLE_WAKES, f"{driven.bell.count - before} wakes of an idle engine"

    @case("I12", timeout_s=60)
    def test_there_is_always_a_next_step_while_there_is_work(self) -> None:
        """While a request is open, step says again=True or wake is called, also when requests come one by one into an
        engine that is idle, and when all but one are aborted.

        If this fails: callers wait for ever for an engine that is alive.
        """
        driven = self.driven()
        prompts, sampling = self.prompts_for(driven.info), driven.sampling(self.max_tokens)
        for prompt in prompts[:4]:
            driven.ask([(prompt, sampling)])
            driven.settle()
        first, last = driven.submit(prompts[0], sampling), driven.submit(prompts[1], sampling)
        driven.advance()
        driven.abort(first)
        driven.run()
        last.check_whole(driven.info)

    @case("I12", needs=EngineCapability.SELF_DRIVEN, proves=True, timeout_s=60)
    def test_a_self_driven_engine_works_without_steps_and_asks_for_them(self) -> None:
        """Requests run on the engine's own thread: with no step at all, wake is called from there, step then only
        fetches, and never says again=True without having brought anything.

        If this fails: the engine does not call EngineContext.wake when it has something, or has the worker spin for it.
        """
        driven = self.driven()
        driven.bell.threads.clear()
        answers = [driven.submit(prompt, driven.sampling(self.max_tokens)) for prompt in self.prompts_for(driven.info)]
        patience_s = STALL_S if EngineCapability.SELF_DRIVEN in self.claimed() else PROOF_S
        before = driven.empty_again
        # The worker asks once after every command.
        driven.step()
        while any(not answer.over for answer in answers):
            assert driven.bell.rung.wait(patience_s), f"no wake for {patience_s:g} s"
            while driven.step().again:
                pass
        for answer in answers:
            answer.check_whole(driven.info)
        assert driven.bell.threads - {driven.desk.thread.ident}, (
            "wake was called by step alone, not by a thread of its own"
        )
        assert driven.empty_again == before, "steps that brought nothing said again=True"

    @case("I8", timeout_s=60)
    def test_stats_count_what_is_there_and_what_was_done(self) -> None:
        """running + waiting are the requests that are open, and 0 when none is; prompt_tokens and generated_tokens grow
        by what was taken and delivered; the cache's blocks are in range.

        If this fails: a request is counted twice or not at all, most likely one that waits, was refused or was aborted.
        """
        driven = self.driven()
        need(type(driven.engine).stats is not Engine.stats, "it has no stats of its own")
        driven.settle()
        before = driven.stats()
        assert (before.running, before.waiting) == (0, 0)
        prompts, sampling = self.prompts_for(driven.info), driven.sampling(self.max_tokens)
        answers: list[Answer] = []
        for number, prompt in enumerate(prompts, 1):
            answers.append(driven.submit(prompt, sampling))
            self._check_open(driven, number, exact=EngineCapability.SELF_DRIVEN not in self.claimed())
        driven.advance()
        self._check_open(driven, len(driven.owed), exact=EngineCapability.SELF_DRIVEN not in self.claimed())
        driven.run()
        driven.settle()
        self._check_totals(driven, before.prompt_tokens, before.generated_tokens, answers)

    def _check_open(self, driven: Driven, open_requests: int, *, exact: bool) -> None:
        """One that works by itself may have ended what was not fetched yet."""
        now = driven.stats()
        count = now.running + now.waiting
        assert count == open_requests or (not exact and 0 <= count <= open_requests), (
            f"{now.running} running + {now.waiting} waiting, and {open_requests} requests are open"
        )
        assert 0 <= now.kv_blocks_used <= now.kv_blocks_total, f"{now.kv_blocks_used} of {now.kv_blocks_total} blocks"

    def _check_totals(self, driven: Driven, prompt: int, generated: int, answers: list[Answer]) -> None:
        now = driven.stats()
        assert (now.running, now.waiting) == (0, 0), f"idle, and it counts {now.running} + {now.waiting} requests"
        taken = sum(len(answer.request.prompt_token_ids) for answer in answers)
        delivered = sum(len(answer.tokens()) for answer in answers)
        kept_back = sum(answer.reasons() == ["stop"] for answer in answers)
        assert now.prompt_tokens - prompt == taken, (
            f"{now.prompt_tokens - prompt} prompt tokens, and {taken} were taken"
        )
        assert delivered <= now.generated_tokens - generated <= delivered + kept_back, (
            f"{now.generated_tokens - generated} generated tokens, and {delivered} were delivered"
        )

    @case("I8", timeout_s=90)
    def test_memory_is_flat_over_many_requests(self) -> None:
        """Requests that finish, fail and are aborted leave nothing behind: Python's allocated blocks do not grow with
        their number.

        If this fails: a table keeps an entry per request; look for the path of aborts and of errors.
        """
        driven = self.driven()
        self._serve_many(driven, PER_ROUND)
        grown: list[float] = []
        while len(grown) < ROUNDS:
            before = _allocated()
            done = self._serve_many(driven, PER_ROUND)
            grown.append((_allocated() - before) / done)
            if grown[-1] < BLOCKS_PER_REQUEST:
                return
        raise AssertionError(f"in {ROUNDS} rounds in a row, blocks that were kept per request: {grown}")

    def _serve_many(self, driven: Driven, count: int) -> int:
        prompts, sampling = self.prompts_for(driven.info), driven.sampling(2)
        began, done = time.monotonic(), 0
        while done < count and time.monotonic() - began < ENOUGH_S:
            answers = [driven.submit(prompts[n % len(prompts)], sampling) for n in range(AT_ONCE)]
            driven.advance()
            driven.abort(answers[0])
            self.refusal(driven, [], sampling)
            driven.run()
            driven.forget()
            done += AT_ONCE
        driven.settle()
        return done


def _allocated() -> int:
    for _ in range(2):
        gc.collect()
    return sys.getallocatedblocks()
