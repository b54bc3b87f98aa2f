"""Echo engines that produce, end or explain tokens wrongly; one fault each."""

from __future__ import annotations

from msgspec import structs

from tests.mutants import caught_by
from tests.mutants.altered_engines import Broken, with_tokens
from tllm_core.contracts.messages import Step

# --------------------------------------------------------------------------------------------------------------- tokens


@caught_by(
    "TestEcho",
    "test_concurrent_requests_get_their_own_tokens_and_one_end_each",
    "are they cumulative rather than deltas",
)
class TellsAllTokensAgain(Broken):
    """token_ids are all tokens so far."""

    def change(self, output):
        self.told = getattr(self, "told", {})
        key = output.request_id, output.index
        self.told[key] = (*self.told.get(key, ()), *output.token_ids)
        return [with_tokens(output, self.told[key])]


@caught_by("TestEcho", "test_concurrent_requests_get_their_own_tokens_and_one_end_each", "got another's tokens")
class MixesUpTokens(Broken):
    """The tokens of a step are dealt out to its requests in the wrong order."""

    def step(self):
        step = super().step()
        tokens = [output.token_ids for output in step.outputs][::-1]
        return Step([with_tokens(*pair) for pair in zip(step.outputs, tokens, strict=True)], step.again)


@caught_by("TestEcho", "test_concurrent_requests_get_their_own_tokens_and_one_end_each", "that sequence has ended")
class EndsTwice(Broken):
    """A sequence's last output comes again."""

    def change(self, output):
        return [output] if output.finish_reason is None else [output, with_tokens(output, ())]


@caught_by("TestEcho", "test_concurrent_requests_get_their_own_tokens_and_one_end_each", "which the engine never took")
class NamesAnUnknownRequest(Broken):
    """Outputs carry an id of the engine's own."""

    def change(self, output):
        return [structs.replace(output, request_id=output.request_id + 1000)]


@caught_by("TestEcho", "test_the_same_greedy_request_gets_the_same_tokens_alone_and_beside_others", "the second time")
class ClaimsToBeRepeatable(Broken):
    """Claims DETERMINISTIC, and every request's tokens depend on how many came before it."""

    def change(self, output):
        return [with_tokens(output, [(token + output.request_id) % 64 for token in output.token_ids])]


@caught_by("TestEcho", "test_the_same_greedy_request_gets_the_same_tokens_alone_and_beside_others", "beside others")
class DependsOnItsNeighbours(Broken):
    """A request's tokens are others where it is not alone in its batch."""

    def change(self, output):
        crowd = len(self._running) > 1
        return [with_tokens(output, [(token + crowd) % 64 for token in output.token_ids])]


@caught_by("TestEcho", "test_temperature_and_seed_are_honoured", "8 seeds at temperature 2 all gave")
class IgnoresTheSeed(Broken):
    """Declares temperature and seed, and looks at neither."""

    def start(self, context):
        info = super().start(context)
        return structs.replace(info, supports=info.supports | {"temperature", "seed"})

    def submit(self, request):
        super().submit(structs.replace(request, sampling=structs.replace(request.sampling, temperature=0.0, seed=None)))


@caught_by(
    "TestEcho",
    "test_each_of_n_sequences_has_its_own_index_tokens_and_end",
    "got .* tokens, and max_tokens is|has ended",
)
class SharesAnIndex(Broken):
    """All sequences of a request are told as its first."""

    def change(self, output):
        return [structs.replace(output, index=0)]


@caught_by(
    "TestEcho", "test_outputs_are_plain_data_with_everything_switched_on", "a token id must be an int, not TokenId"
)
class DeliversObjects(Broken):
    """Token ids are of a type of its own."""

    def change(self, output):
        return [with_tokens(output, map(type("TokenId", (int,), {}), output.token_ids))]


# ----------------------------------------------------------------------------------------------------------------- ends


@caught_by("TestEcho", "test_max_tokens_is_the_number_of_tokens", "got 2 tokens, and max_tokens is 1")
class IgnoresMaxTokens(Broken):
    """One token more than was asked for."""

    def change(self, output):
        return [with_tokens(output, [*output.token_ids, 1]) if output.finish_reason == "length" else output]


@caught_by("TestEcho", "test_max_tokens_is_the_number_of_tokens", "nothing could have stopped it")
class CallsAllEndsStop(Broken):
    """The finish reason is "stop", whatever ended the sequence."""

    def change(self, output):
        return [structs.replace(output, finish_reason=output.finish_reason and "stop")]


@caught_by(
    "TestEcho", "test_no_max_tokens_means_what_fits", "ended with 'length' after 4 tokens, and 16 were asked for"
)
class HasADefaultLength(Broken):
    """Without max_tokens, a request gets four tokens."""

    def submit(self, request):
        sampling = structs.replace(request.sampling, max_tokens=request.sampling.max_tokens or 4)
        super().submit(structs.replace(request, sampling=sampling))


@caught_by("TestEcho", "test_a_stop_token_ends_its_sequence_alone", "went on after its stop token")
class RunsOverStopTokens(Broken):
    """stop_token_ids are declared and not looked at."""

    def submit(self, request):
        super().submit(structs.replace(request, sampling=structs.replace(request.sampling, stop_token_ids=())))


@caught_by("TestEcho", "test_nothing_stops_before_min_tokens", r"min_tokens is 5")
class IgnoresMinTokens(Broken):
    """min_tokens is declared and not looked at."""

    def submit(self, request):
        super().submit(structs.replace(request, sampling=structs.replace(request.sampling, min_tokens=0)))


@caught_by(
    "TestEcho", "test_the_models_own_end_stops_without_a_stop_reason_unless_ignored", "went on after the model's end"
)
class NeverEndsByItself(Broken):
    """Declares an end of its own, and goes on after it."""

    def submit(self, request):
        super().submit(structs.replace(request, sampling=structs.replace(request.sampling, ignore_eos=True)))


# ------------------------------------------------------------------------------------------------------------- logprobs


class Shifted(Broken):
    """`fields` are delivered one position late."""

    fields: tuple[str, ...] = ()

    def change(self, output):
        values = {name: getattr(output, name) for name in self.fields if getattr(output, name)}
        last = self.last = getattr(self, "last", {})
        late = {}
        for name, value in values.items():
            key = name, output.request_id, output.index
            late[name], last[key] = last.get(key, value), value
        return [structs.replace(output, **late)]


@caught_by("TestEcho", "test_logprobs_are_aligned_with_tokens_and_descending", "the first entry is of token")
class LogprobsComeLate(Shifted):
    """Logprobs are those of the token before."""

    fields = ("logprobs",)


@caught_by(
    "TestEcho", "test_prompt_logprobs_come_once_and_are_aligned_with_the_prompt", "nothing is before the first token"
)
class PromptLogprobsAreShifted(Broken):
    """Prompt logprobs begin with the second token's."""

    def change(self, output):
        if output.prompt_logprobs is None:
            return [output]
        return [structs.replace(output, prompt_logprobs=[*output.prompt_logprobs[1:], ()])]
