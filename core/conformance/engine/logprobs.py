"""Cases: log-probabilities belong to the tokens that they come with."""

from __future__ import annotations

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.answers import Answer, check_logprobs
from tllm_core.conformance.engine.driven import Driven
from tllm_core.conformance.engine.subject import EngineSuite, need

TOPS = (0, 1, 5)


class LogprobCases(EngineSuite):
    """Of generated tokens and of prompts."""

    @case("I2", timeout_s=60)
    def test_logprobs_are_aligned_with_tokens_and_descending(self) -> None:
        """With logprobs=k every token has one entry: itself first, then the top k, best first, as natural logs.
        Requests without get none, also beside ones with.

        If this fails: entries are of another position or sequence, unsorted, or probabilities rather than logs.
        """
        driven = self.driven()
        need(driven.supports("logprobs"), "it does not support logprobs")
        prompts = self.prompts_for(driven.info)
        tops = [top for top in TOPS if top <= (driven.info.vocab_size or max(TOPS))]
        asked = [(prompt, driven.sampling(self.max_tokens, logprobs=top)) for prompt in prompts[:4] for top in tops]
        *answers, without = driven.ask([*asked, (prompts[0], driven.sampling(self.max_tokens))])
        for answer in answers:
            self._check(answer, driven)
        assert not without.logprobs(), "a request that did not ask for logprobs got some"

    @case("I2", timeout_s=60)
    def test_logprobs_of_sampled_sequences_are_their_own(self) -> None:
        """Sampled sequences of one request, and several requests beside each other, each get the entries of their own
        tokens.

        If this fails: the rows of a batch are mixed up where sampling reorders them.
        """
        driven = self.driven()
        need(driven.supports("logprobs", "temperature"), "it does not support logprobs and temperature")
        n = 2 if driven.supports("n") else 1
        seeded = {"seed": 5} if driven.supports("seed") else {}
        sampling = driven.sampling(self.max_tokens, logprobs=2, temperature=1.5, n=n, **seeded)
        for answer in driven.ask((prompt, sampling) for prompt in self.prompts_for(driven.info)):
            self._check(answer, driven)

    def _check(self, answer: Answer, driven: Driven) -> None:
        top = answer.sampling.logprobs
        assert top is not None
        for index, tokens in enumerate(answer.all_tokens()):
            entries = answer.logprobs(index)
            assert len(entries) == len(tokens), f"{len(entries)} logprobs for {len(tokens)} tokens"
            for place, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
                who = f"logprobs of request {answer.request.request_id}, index {index}, token {place}"
                check_logprobs(entry, token, top, driven.info.vocab_size, who)
                if answer.sampling.temperature == 0:
                    assert entry[0].rank == 1, f"{who}: a greedy token of rank {entry[0].rank}"

    @case("I2", timeout_s=60)
    def test_prompt_logprobs_come_once_and_are_aligned_with_the_prompt(self) -> None:
        """With prompt_logprobs=k the first output has one entry per prompt token, of which the first is empty; once per
        request.

        If this fails: positions are shifted by one, or they come with every sequence or not at all.
        """
        driven = self.driven()
        need(driven.supports("prompt_logprobs"), "it does not support prompt_logprobs")
        prompts = self.prompts_for(driven.info)
        asked = [(prompt, driven.sampling(self.max_tokens, prompt_logprobs=1)) for prompt in prompts]
        if driven.supports("n"):
            asked.append((prompts[0], driven.sampling(self.max_tokens, prompt_logprobs=1, n=2)))
        *answers, without = driven.ask([*asked, (prompts[0], driven.sampling(self.max_tokens))])
        for answer in answers:
            self._check_prompt(answer, driven)
        assert not without.prompt_logprobs(), "a request that did not ask for prompt_logprobs got some"

    def _check_prompt(self, answer: Answer, driven: Driven) -> None:
        who, prompt = f"prompt_logprobs of request {answer.request.request_id}", answer.request.prompt_token_ids
        delivered = answer.prompt_logprobs()
        assert len(delivered) == 1, f"{who} were delivered {len(delivered)} times"
        (entries,) = delivered
        index = next(output.index for output in answer.outputs if output.prompt_logprobs is not None)
        first = next(output for output in answer.outputs if output.index == index)
        assert first.prompt_logprobs is not None, f"{who} come after the first output"
        assert len(entries) == len(prompt), f"{who}: {len(entries)} entries for {len(prompt)} tokens"
        assert not entries[0], f"{who}: nothing is before the first token, and its entry is {entries[0]}"
        for place in range(1, len(prompt)):
            check_logprobs(entries[place], prompt[place], 1, driven.info.vocab_size, f"{who}, token {place}")
