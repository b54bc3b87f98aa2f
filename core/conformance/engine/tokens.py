"""Cases: every request gets its own tokens, all of them, once."""

from __future__ import annotations

from collections.abc import Sequence

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.driven import Driven
from tllm_core.conformance.engine.subject import EngineSuite, need
from tllm_core.contracts.interfaces import EngineCapability
from tllm_core.contracts.messages import SamplingParams

SEEDS = range(1, 9)
CROWD = 16


class TokenCases(EngineSuite):
    """What is produced, for whom, and whether it is the same again."""

    @case("I2", timeout_s=60)
    def test_concurrent_requests_get_their_own_tokens_and_one_end_each(self) -> None:
        """Requests that run beside each other, some of them submitted while others run, each get as many tokens as they
        asked for, in deltas, and one end.

        If this fails: outputs carry another request's id, token_ids are cumulative, or a request is forgotten or ended
        twice.
        """
        driven = self.driven()
        prompts = self.prompts_for(driven.info)
        asked = [
            (prompts[number % len(prompts)], driven.sampling(1 + number % self.max_tokens)) for number in range(CROWD)
        ]
        answers = []
        for number, (prompt, sampling) in enumerate(asked):
            answers.append(driven.submit(prompt, sampling))
            if number % 3 == 2:
                driven.advance()
        driven.run()
        for answer in answers:
            answer.check_whole(driven.info)
        if EngineCapability.DETERMINISTIC in self.claimed():
            for answer, (prompt, sampling) in zip(answers, asked, strict=True):
                (alone,) = driven.ask([(prompt, sampling)])
                assert answer.tokens() == alone.tokens(), f"request {answer.request.request_id} got another's tokens"

    @case("I2", needs=EngineCapability.DETERMINISTIC, proves=True, timeout_s=60)
    def test_the_same_greedy_request_gets_the_same_tokens_alone_and_beside_others(self) -> None:
        """A greedy request gets the same tokens twice in a row, beside others, and in whatever order they come.

        If this fails: what one request computes depends on its neighbours, or on what ran before; do not claim
        DETERMINISTIC.
        """
        driven = self.driven()
        self._check_repeatable(driven, driven.sampling(self.max_tokens))

    @case("I2", needs=EngineCapability.DETERMINISTIC, timeout_s=60)
    def test_the_same_seed_gets_the_same_tokens_alone_and_beside_others(self) -> None:
        """A sampled request with a seed gets the same tokens twice in a row, beside others, and in whatever order they
        come.

        If this fails: requests share a random generator, or the seed is ignored.
        """
        driven = self.driven()
        need(driven.supports("temperature", "seed"), "it does not support temperature and seed")
        self._check_repeatable(driven, driven.sampling(self.max_tokens, temperature=1.0, seed=7))

    def _check_repeatable(self, driven: Driven, sampling: SamplingParams) -> None:
        asked = [(prompt, sampling) for prompt in self.prompts_for(driven.info)]
        alone = [driven.ask([request])[0].all_tokens() for request in asked]
        again = [driven.ask([request])[0].all_tokens() for request in asked]
        assert again == alone, "the same request got other tokens the second time"
        together = [answer.all_tokens() for answer in driven.ask(asked)]
        assert together == alone, "the same request got other tokens beside others"
        backwards = [answer.all_tokens() for answer in driven.ask(asked[::-1])][::-1]
        assert backwards == alone, "the same request got other tokens in another order"

    @case("I2", timeout_s=60)
    def test_temperature_and_seed_are_honoured(self) -> None:
        """Where both are supported, high temperature and eight seeds do not give one and the same answer.

        If this fails: temperature or seed is declared in `supports` and ignored.
        """
        driven = self.driven()
        need(driven.supports("temperature", "seed"), "it does not support temperature and seed")
        prompt = self.prompts_for(driven.info)[0]
        asked = [(prompt, driven.sampling(self.max_tokens, temperature=2.0, seed=seed)) for seed in SEEDS]
        seen = {tuple(answer.tokens()) for answer in driven.ask(asked)}
        assert len(seen) > 1, f"{len(SEEDS)} seeds at temperature 2 all gave {seen}"

    @case("I1", "I2", timeout_s=60)
    def test_each_of_n_sequences_has_its_own_index_tokens_and_end(self) -> None:
        """With n=3, indexes 0, 1 and 2 each get their tokens and end once; beside requests with n=1.

        If this fails: sequences of one request share an index, or the request ends with its first sequence.
        """
        driven = self.driven()
        need(driven.supports("n"), "it does not support n")
        prompts = self.prompts_for(driven.info)
        several, one = driven.sampling(self.max_tokens, n=3), driven.sampling(self.max_tokens)
        asked = [(prompts[0], several), (prompts[1], one), (prompts[2], several)]
        answers = driven.ask(asked)
        if driven.supports("temperature", "seed"):
            warm = driven.sampling(self.max_tokens, n=3, temperature=2.0, seed=3)
            (answer,) = driven.ask([(prompts[0], warm)])
            assert len(_distinct(answer.all_tokens())) > 1, "three sampled sequences of one request are all the same"
        if EngineCapability.DETERMINISTIC in self.claimed():
            assert [answer.all_tokens() for answer in driven.ask(asked)] == [a.all_tokens() for a in answers]

    @case("I9", timeout_s=60)
    def test_outputs_are_plain_data_with_everything_switched_on(self) -> None:
        """Token ids are ints and all that an output carries are plain values, also with every kind of extra that is
        supported.

        If this fails: tensors, numpy scalars or objects of the engine's own get into an Output.
        """
        driven = self.driven()
        switches = {"logprobs": 2, "prompt_logprobs": 1, "n": 2}
        wanted = {name: value for name, value in switches.items() if driven.supports(name)}
        driven.ask((prompt, driven.sampling(self.max_tokens, **wanted)) for prompt in self.prompts_for(driven.info)[:3])


def _distinct(answers: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return set(map(tuple, answers))
