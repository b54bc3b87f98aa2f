"""Cases: why a sequence ends, and where."""

from __future__ import annotations

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.answers import Answer
from tllm_core.conformance.engine.driven import Driven
from tllm_core.conformance.engine.subject import EngineSuite, need
from tllm_core.contracts.interfaces import EngineCapability
from tllm_core.contracts.messages import SamplingParams

NEAR_LIMIT = 16
"""How far below the longest sequence a request begins that runs until it."""
LONGEST = 8192
"""A limit above it is not run into: it would take too long."""
SEARCH = 64
"""Tokens in which a model's own end is looked for."""


class EndCases(EngineSuite):
    """Finish reasons, stop tokens and lengths."""

    @case("I2", timeout_s=60)
    def test_max_tokens_is_the_number_of_tokens(self) -> None:
        """A request that nothing else ends gets exactly max_tokens tokens, with finish reason "length" on the last.

        If this fails: the first token, or the one of the last step, is counted wrongly.
        """
        driven = self.driven()
        need(driven.runs_full, "its requests may end by themselves, since it does not support ignore_eos")
        prompts = self.prompts_for(driven.info)
        lengths = [1, 2, self.max_tokens]
        answers = driven.ask((prompts[n % len(prompts)], driven.sampling(n)) for n in lengths)
        assert [answer.reasons() for answer in answers] == [["length"]] * len(lengths)
        assert [len(answer.tokens()) for answer in answers] == lengths

    @case("I2", timeout_s=120)
    def test_no_max_tokens_means_what_fits(self) -> None:
        """Without max_tokens a request runs until prompt and new tokens together are max_seq_len.

        If this fails: max_tokens None is taken for a default of the engine's own, or max_seq_len is not what it
        advertises.
        """
        driven = self.driven()
        limit = driven.info.max_seq_len
        need(limit is not None and limit <= LONGEST, f"max_seq_len is {limit}: set a smaller one to have this checked")
        need(driven.runs_full, "its requests may end by themselves, since it does not support ignore_eos")
        assert limit is not None
        room = min(NEAR_LIMIT, limit // 2)
        (answer,) = driven.ask([(self.long_prompt(driven.info, limit - room), driven.sampling(None))])
        assert answer.reasons() == ["length"]
        assert len(answer.tokens()) == room

    @case("I2", timeout_s=60)
    def test_a_stop_token_ends_its_sequence_alone(self) -> None:
        """One of stop_token_ids ends the sequence with finish reason "stop" and that id as stop_reason; nothing follows
        it. It comes last, or is kept back. Others that run beside it go on.

        If this fails: the sequence goes on after its stop token, ends before it, or ends others.
        """
        driven = self.driven()
        need(driven.supports("stop_token_ids"), "it does not support stop_token_ids")
        prompts = self.prompts_for(driven.info)
        free = driven.ask((prompt, driven.sampling(self.max_tokens)) for prompt in prompts)
        stops = [answer.tokens()[len(answer.tokens()) // 2] for answer in free]
        asked = [
            (prompt, driven.sampling(self.max_tokens, stop_token_ids=(stop,)) if number % 2 else answer.sampling)
            for number, (prompt, stop, answer) in enumerate(zip(prompts, stops, free, strict=True))
        ]
        stopped = driven.ask(asked)
        for number, (answer, stop, before) in enumerate(zip(stopped, stops, free, strict=True)):
            if number % 2:
                self._check_stop(answer, stop, before)
            elif EngineCapability.DETERMINISTIC in self.claimed():
                assert answer.tokens() == before.tokens(), "a request changed because another one stopped"

    def _check_stop(self, answer: Answer, stop: int, free: Answer) -> None:
        tokens = answer.tokens()
        assert stop not in tokens[:-1], f"it went on after its stop token {stop}: {tokens}"
        if answer.reasons() == ["stop"]:
            assert answer.ends[0].stop_reason == stop, f"it stopped for {answer.ends[0].stop_reason!r}, not {stop}"
        if EngineCapability.DETERMINISTIC in self.claimed():
            until = free.tokens().index(stop)
            assert answer.reasons() == ["stop"], f"token {stop} does not stop it: {tokens}"
            assert tokens in (free.tokens()[:until], free.tokens()[: until + 1]), (
                f"{free.tokens()} with the stop token {stop} became {tokens}"
            )

    @case("I2", timeout_s=60)
    def test_the_stop_token_is_delivered_where_that_is_asked_for(self) -> None:
        """Where include_stop_str_in_output is supported, a stop token is the last token with it, and kept back without.

        If this fails: include_stop_str_in_output is declared in `supports` and ignored.
        """
        driven = self.driven()
        names = ("stop_token_ids", "include_stop_str_in_output")
        need(driven.supports(*names), f"it does not support {' and '.join(names)}")
        need(EngineCapability.DETERMINISTIC in self.claimed(), "only repeatable answers show it")
        prompt = self.prompts_for(driven.info)[0]
        (free,) = driven.ask([(prompt, driven.sampling(self.max_tokens))])
        stop = free.tokens()[self.max_tokens // 2]
        until = free.tokens().index(stop)
        for included in (False, True):
            sampling = driven.sampling(self.max_tokens, stop_token_ids=(stop,), include_stop_str_in_output=included)
            (answer,) = driven.ask([(prompt, sampling)])
            assert answer.tokens() == free.tokens()[: until + included]

    @case("I2", timeout_s=60)
    def test_nothing_stops_before_min_tokens(self) -> None:
        """With min_tokens, a stop token among the first ones does not end the sequence.

        If this fails: min_tokens is declared in `supports` and ignored.
        """
        driven = self.driven()
        need(driven.supports("stop_token_ids", "min_tokens"), "it does not support stop_token_ids and min_tokens")
        prompts = self.prompts_for(driven.info)
        first = [answer.tokens()[0] for answer in driven.ask((p, driven.sampling(1)) for p in prompts)]
        least = self.max_tokens // 2 + 1
        for answer in driven.ask(
            (prompt, driven.sampling(self.max_tokens, min_tokens=least, stop_token_ids=(stop,)))
            for prompt, stop in zip(prompts, first, strict=True)
        ):
            assert len(answer.tokens()) >= least

    @case("I2", timeout_s=120)
    def test_the_models_own_end_stops_without_a_stop_reason_unless_ignored(self) -> None:
        """One of eos_token_ids ends a sequence with finish reason "stop" and no stop_reason, and ignore_eos lets it go
        on.

        If this fails: eos_token_ids are not those that end a sequence, or ignore_eos is declared in `supports` and
        ignored.
        """
        driven = self.driven()
        need(bool(driven.info.eos_token_ids), "it has no end of its own")
        need(driven.supports("ignore_eos"), "it does not support ignore_eos")
        length = min(SEARCH, (driven.info.max_seq_len or 2 * SEARCH) // 2)
        prompts = [prompt[:length] for prompt in self.prompts_for(driven.info)]
        free = driven.ask((prompt, driven.sampling(length)) for prompt in prompts)
        assert all(answer.reasons() == ["length"] for answer in free), "ignore_eos is ignored"
        ending = [answer for answer in free if _eos_in(answer, driven) is not None]
        need(bool(ending), "no prompt's answer reaches the model's own end; set `prompts` of which one does")
        self._check_own_ends(driven, ending, length)

    def _check_own_ends(self, driven: Driven, ending: list[Answer], length: int) -> None:
        sampling = SamplingParams(max_tokens=length)
        for answer, free in zip(
            driven.ask((answer.request.prompt_token_ids, sampling) for answer in ending), ending, strict=True
        ):
            assert not set(answer.tokens()[:-1]) & set(driven.info.eos_token_ids), "it went on after the model's end"
            if EngineCapability.DETERMINISTIC in self.claimed():
                until = _eos_in(free, driven)
                assert until is not None
                assert answer.reasons() == ["stop"]
                assert answer.ends[0].stop_reason is None, f"stop_reason {answer.ends[0].stop_reason!r}: none was given"
                assert answer.tokens() in (free.tokens()[:until], free.tokens()[: until + 1])


def _eos_in(answer: Answer, driven: Driven) -> int | None:
    places = [place for place, token in enumerate(answer.tokens()) if token in driven.info.eos_token_ids]
    return places[0] if places else None
