"""Cases: an engine does what it advertises, refuses what it can't do, and one bad request harms no other."""

from __future__ import annotations

from typing import Any

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.driven import Driven
from tllm_core.conformance.engine.endings import LONGEST
from tllm_core.conformance.engine.subject import EngineSuite, need
from tllm_core.contracts.interfaces import EngineCapability
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import RequestError

CHANGED: dict[str, Any] = {
    "n": 2,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 1,
    "stop": ("x",),
    "stop_token_ids": (0,),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "logit_bias": {0: 0.5},
    "allowed_token_ids": tuple(range(8)),
    "bad_words": ("x",),
    "bad_token_sequences": ((0, 0, 0),),
    "best_of": 2,
    "guided": {"regex": "[a-z ]*"},
}
"""One value other than the default for each sampling field that an engine may not support."""
TEXT = frozenset({"stop", "bad_words"})
"""What is text, and taken by `LLM` for engines that know tokens alone."""
FIELDS: dict[str, Any] = {"cache_salt": "salt", "extra": {"tllm_conformance": 1}}
"""The same of requests."""


class LimitCases(EngineSuite):
    """`EngineInfo` is a promise."""

    @case("I5", timeout_s=60)
    def test_what_is_not_in_supports_is_refused_by_name(self) -> None:
        """A field that `supports` does not list and that the engine gets all the same, as from another frontend, ends
        that request with a RequestError that names the field.

        If this fails: the engine ignores what it does not support; check it in `submit`.
        """
        driven = self.driven()
        prompt = self.prompts_for(driven.info)[0]
        usual = driven.sampling(self.max_tokens)
        for name in CHANGED.keys() - driven.info.supports:
            fields = {"max_tokens": self.max_tokens, name: CHANGED[name]}
            error = self.refusal(driven, prompt, SamplingParams(**fields))
            assert error.field == name or name in error.message, f"the refusal does not name {name}: {error}"
        for name in FIELDS.keys() - driven.info.supports:
            error = self.refusal(driven, prompt, usual, **{name: FIELDS[name]})
            assert error.field == name or name in error.message, f"the refusal does not name {name}: {error}"
        driven.ask([(prompt, usual)])

    @case("I5", timeout_s=60)
    def test_what_is_in_supports_is_taken_and_hints_never_refuse(self) -> None:
        """Every sampling field of `supports` is taken, alone and all together, and so are priority and trace_context.

        If this fails: `supports` lists what the engine refuses.
        """
        driven = self.driven()
        prompt = self.prompts_for(driven.info)[0]
        changed = {name: CHANGED[name] for name in sorted(CHANGED.keys() & driven.info.supports - TEXT)}
        each = [driven.sampling(self.max_tokens, **{name: value}) for name, value in changed.items()]
        # A grammar and allowed_token_ids may leave nothing to choose.
        together = {name: value for name, value in changed.items() if name != "guided"}
        driven.ask((prompt, sampling) for sampling in [*each, driven.sampling(self.max_tokens, **together)])
        hints: dict[str, Any] = {"priority": -3, "trace_context": {"traceparent": "00-1-2-01"}}
        if driven.supports("cache_salt"):
            hints["cache_salt"] = "salt"
        answer = driven.submit(prompt, driven.sampling(self.max_tokens), **hints)
        driven.run()
        answer.check_whole(driven.info)

    @case("I5", timeout_s=120)
    def test_the_longest_request_that_fits_is_served_and_no_longer_one(self) -> None:
        """A prompt of max_seq_len - 1 tokens gets its one token; one of max_seq_len is refused; prompt and new tokens
        together never exceed max_seq_len.

        If this fails: the limit that the engine advertises is off by one, or not checked.
        """
        driven = self.driven()
        limit = driven.info.max_seq_len
        need(limit is not None and limit <= LONGEST, f"max_seq_len is {limit}: set a smaller one to have this checked")
        assert limit is not None
        driven.ask([(self.long_prompt(driven.info, limit - 1), driven.sampling(1))])
        self.refusal(driven, self.long_prompt(driven.info, limit), driven.sampling(1))
        self._check_never_beyond(driven, limit)

    def _check_never_beyond(self, driven: Driven, limit: int) -> None:
        try:
            answer = driven.submit(self.long_prompt(driven.info, limit - 3), driven.sampling(4))
        except RequestError:
            return
        driven.run()
        assert len(answer.tokens()) <= 3, f"a sequence grew beyond max_seq_len {limit}"

    @case("I5", timeout_s=60)
    def test_bad_requests_end_alone(self) -> None:
        """An empty prompt, token ids outside the vocabulary and an impossible length are refused, each with a message,
        and requests that run beside them get what they get alone.

        If this fails: one request's error ends the engine, or what it left behind reaches others.
        """
        driven = self.driven()
        prompts, sampling = self.prompts_for(driven.info), driven.sampling(self.max_tokens)
        alone = [answer.tokens() for answer in driven.ask((prompt, sampling) for prompt in prompts)]
        bad: list[list[int]] = [[]]
        if driven.info.vocab_size is not None:
            bad += [[*prompts[0], driven.info.vocab_size], [2**31 - 1]]
        if driven.info.max_seq_len is not None:
            bad.append(self.long_prompt(driven.info, driven.info.max_seq_len + 1))
        answers = []
        for number, prompt in enumerate(prompts):
            answers.append(driven.submit(prompt, sampling))
            refused = self.refusal(driven, bad[number % len(bad)], sampling)
            assert refused.message.strip(), "a request was refused without a word"
            driven.advance()
        driven.run()
        for answer in answers:
            answer.check_whole(driven.info)
        if EngineCapability.DETERMINISTIC in self.claimed():
            assert [answer.tokens() for answer in answers] == alone, "a bad request changed what others get"
