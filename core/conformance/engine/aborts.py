"""Cases: an abort ends a request in whatever phase it is, and frees what it held."""

from __future__ import annotations

from collections.abc import Callable

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.answers import Answer
from tllm_core.conformance.engine.driven import Driven
from tllm_core.conformance.engine.subject import EngineSuite, need
from tllm_core.contracts.interfaces import Engine, EngineCapability
from tllm_core.contracts.messages import IterationStats

LONG_PROMPT = 512
CROWD = 96
"""More than most engines run at once, so that some of them wait."""


class AbortCases(EngineSuite):
    """After `abort` nothing is delivered for a request, and nothing is held for it."""

    @case("I3", "I8", timeout_s=90)
    def test_an_abort_in_any_phase_delivers_nothing_more_and_frees_everything(self) -> None:
        """A request that is aborted before its first step, in its prompt, after its first token or midway gets nothing
        more; those beside it get what they get alone; then the engine says that it is idle and holds what it held
        before.

        If this fails: step() returns outputs of aborted requests, or their place in the batch or cache is kept.
        """
        driven = self.driven()
        before = self._idle_stats(driven)
        for phase, reached in self._phases(driven).items():
            alone, beside, victim = self._two(driven)
            driven.run(lambda victim=victim, reached=reached: reached(victim))  # type: ignore[misc]
            had = victim.all_tokens()
            driven.abort(victim)
            driven.run()
            driven.settle()
            assert victim.all_tokens() == had, f"{phase}: tokens after the abort"
            beside.check_whole(driven.info)
            if EngineCapability.DETERMINISTIC in self.claimed():
                assert beside.tokens() == alone.tokens(), f"{phase}: the abort changed what another request gets"
            self._check_idle(driven, before, phase)

    def _phases(self, driven: Driven) -> dict[str, Callable[[Answer], bool]]:
        steps = iter(range(10**6))
        return {
            "before its first step": lambda victim: True,
            "after one step": lambda victim: next(steps) > 0,
            "after its first token": lambda victim: bool(victim.tokens()),
            "midway": lambda victim: len(victim.tokens()) >= self.max_tokens // 2,
            "when it has ended": lambda victim: victim.over,
        }

    def _two(self, driven: Driven) -> tuple[Answer, Answer, Answer]:
        """What a request gets alone, the same request again, and one beside it that has a long prompt."""
        prompt, sampling = self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens)
        (alone,) = driven.ask([(prompt, sampling)])
        room = (driven.info.max_seq_len or LONG_PROMPT) - self.max_tokens
        long = self.long_prompt(driven.info, min(LONG_PROMPT, room))
        return alone, driven.submit(prompt, sampling), driven.submit(long, sampling)

    @case("I3", "I8", timeout_s=60)
    def test_an_abort_ends_all_sequences_of_a_request(self) -> None:
        """With n=3, one abort ends all sequences that are still running; also a request that comes after it brings nothing more.

        If this fails: only one sequence of the request is taken out of the batch.
        """
        driven = self.driven()
        need(driven.supports("n"), "it does not support n")
        before = self._idle_stats(driven)
        victim = driven.submit(self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens, n=3))
        driven.run(lambda: bool(victim.outputs))
        driven.abort(victim)
        driven.settle()
        self._check_idle(driven, before, "n=3")
        driven.ask([(self.prompts_for(driven.info)[1], driven.sampling(self.max_tokens))])

    @case("I6", timeout_s=60)
    def test_aborting_what_is_unknown_or_over_does_nothing(self) -> None:
        """Aborts of ids that were never used, of finished and of aborted requests are quiet, and harm nobody.

        If this fails: abort() looks an id up that need not be there.
        """
        driven = self.driven()
        prompt, sampling = self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens)
        (finished,) = driven.ask([(prompt, sampling)])
        running, victim = driven.submit(prompt, sampling), driven.submit(prompt, sampling)
        for answer in (finished, victim, victim, 10**9, 0):
            driven.abort(answer)
        driven.advance()
        driven.abort(victim)
        driven.run()
        running.check_whole(driven.info)

    @case("I8", timeout_s=60)
    def test_a_crowd_that_is_aborted_at_once_leaves_nothing(self) -> None:
        """Of many requests, more than run at once, every second is aborted while it waits or runs: the rest end as they
        should, and the engine is idle afterwards.

        If this fails: requests that wait can't be aborted, or those that waited behind them are forgotten.
        """
        driven = self.driven()
        before = self._idle_stats(driven)
        prompts, sampling = self.prompts_for(driven.info), driven.sampling(self.max_tokens)
        answers = [driven.submit(prompts[n % len(prompts)], sampling) for n in range(CROWD)]
        driven.advance()
        for answer in answers[::2]:
            driven.abort(answer)
        driven.run()
        driven.settle()
        for answer in answers[1::2]:
            answer.check_whole(driven.info)
        self._check_idle(driven, before, "a crowd")

    def _idle_stats(self, driven: Driven) -> IterationStats:
        """After one request, so that what is made once is there."""
        driven.ask([(self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens))])
        driven.settle()
        return driven.stats()

    def _check_idle(self, driven: Driven, before: IterationStats, when: str) -> None:
        if type(driven.engine).stats is Engine.stats:
            return
        now = driven.stats()
        assert (now.running, now.waiting) == (0, 0), (
            f"{when}: idle, and it counts {now.running} + {now.waiting} requests"
        )
        assert now.kv_blocks_used <= before.kv_blocks_used, (
            f"{when}: {now.kv_blocks_used} blocks are used, and were {before.kv_blocks_used} before"
        )
