"""From logits and sampled tokens to what requests are told: tokens, ends, and failures of their own.

The token that ends a sequence, the model's own or one of `stop_token_ids`, is not delivered unless
`include_stop_str_in_output` is set; its logprobs neither. It counts as generated.
"""

from collections.abc import Sequence as AbstractSequence

import torch

from tllm_core.contracts.messages import ErrorReport, FinishReason, IterationStats, Output, TokenLogprobs
from tllm_core.engines.tp.logprobs import token_logprobs
from tllm_core.engines.tp.requests import LiveRequest
from tllm_core.engines.tp.rules import nothing_left
from tllm_core.engines.tp.sampler import EMPTY, Sampled
from tllm_core.engines.tp.scheduled import Probe, PromptRows
from tllm_core.engines.tp.scheduler import Scheduler
from tllm_core.engines.tp.sequence import Sequence

_BROKEN = "the model's logits are not finite (NaN or infinity); this request can't go on"


class Outcomes:
    """Moves the requests in `live` on, takes those that end out of it and of the scheduler, and counts their prompts."""

    def __init__(self, live: dict[int, LiveRequest], scheduler: Scheduler, stats: IterationStats) -> None:
        self._live, self._scheduler, self._stats = live, scheduler, stats

    def advance(self, sequences: list[Sequence], sampled: Sampled, now: float) -> list[Output]:
        """Gives each of `sequences` its sampled token, or fails its request where there is none. now: monotonic seconds."""
        outputs: list[Output] = []
        logprobs = sampled.logprobs or [None] * len(sequences)
        for sequence, token, entries in zip(sequences, sampled.token_ids, logprobs, strict=True):
            live = self._live.get(sequence.request_id)
            if live is None:
                continue  # it failed in this very step
            if token < 0:
                outputs.append(self.fail(live, *_words_of(sequence, token)))
            elif live.ranking is None:
                outputs.append(self._advance_one(live, sequence, token, now, entries))
            else:
                assert entries is not None
                outputs += live.ranking.take(self._advance_one(live, sequence, token, now, entries), entries[0].logprob)
        return outputs

    def _advance_one(
        self, live: LiveRequest, sequence: Sequence, token: int, now: float, logprobs: TokenLogprobs | None
    ) -> Output:
        sequence.token_ids.append(token)
        length = len(sequence.token_ids)
        output = Output(request_id=live.request_id, token_ids=(token,), index=sequence.index)
        if logprobs is not None and sequence.sampling.logprobs is not None:
            output.logprobs = (logprobs,)
        if length == sequence.prompt_len + 1:
            if live.first_token_at is None:
                self._stats.prompt_tokens += live.prompt_tokens
                self._stats.cached_tokens += sequence.cached_tokens
            live.note_first_token(sequence, now)
            if sequence.prompt_logprobs is not None:
                output.prompt_logprobs = sequence.prompt_logprobs
        if token in sequence.stop_ids and length > sequence.min_len:
            self._end(output, live, sequence, "stop", now)
        elif length >= sequence.max_len:
            self._end(output, live, sequence, "length", now)
        return output

    def _end(self, output: Output, live: LiveRequest, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._scheduler.remove(sequence)
        output.finish_reason = reason
        if reason == "stop":
            self._stop(output, sequence)
        output.metrics = live.end(sequence, now)
        if output.metrics is not None:
            del self._live[live.request_id]

    def _stop(self, output: Output, sequence: Sequence) -> None:
        (token,) = output.token_ids
        if token in sequence.sampling.stop_token_ids:
            output.stop_reason = token
        if not sequence.sampling.include_stop_str_in_output:
            output.token_ids = ()
            output.logprobs = None

    def fail(self, live: LiveRequest, message: str = _BROKEN, field: str | None = None) -> Output:
        """Ends one request and nothing else."""
        del self._live[live.request_id]
        self.drop(live, broken=message is _BROKEN)
        return Output(request_id=live.request_id, error=ErrorReport(message, field))

    def drop(self, live: LiveRequest, *, broken: bool = False) -> None:
        """Ends all its sequences, of which nobody is told; `broken`: what they left in the cache may be NaN."""
        for sequence in live.sequences:
            self._scheduler.remove(sequence, broken=broken)

    def note_prompts(self, logits: torch.Tensor, wanted: AbstractSequence[PromptRows]) -> list[Output]:
        """Keeps the logprobs of prompt tokens until their sequence's first output; those that are broken fail now."""
        failed: list[Output] = []
        for sequence, first, length, position in wanted:
            ids = sequence.token_ids[position + 1 : position + 1 + length]
            tokens = torch.frombuffer(ids, dtype=torch.int32).to(logits.device, torch.int64)
            top = sequence.sampling.prompt_logprobs or 0
            found = token_logprobs(logits[first : first + length], tokens, [top] * length)
            if sequence.prompt_logprobs is None or None in found:
                failed.append(self.fail(self._live[sequence.request_id]))
            else:
                sequence.prompt_logprobs += [entries for entries in found if entries is not None]
        return failed

    def note_probes(self, logits: torch.Tensor, probes: AbstractSequence[Probe]) -> list[Output]:
        """Fails those whose chunk is broken, before anybody finds it in the cache."""
        sound = torch.isfinite(logits[[probe.row for probe in probes]].amax(dim=-1)).tolist()
        broken = [sequence.request_id for (sequence, _), fine in zip(probes, sound, strict=True) if not fine]
        return [self.fail(self._live[request_id]) for request_id in broken if request_id in self._live]


def _words_of(sequence: Sequence, token: int) -> tuple[str, str | None]:
    """Why a sequence has no token: the message, and the field that is to blame."""
    guide = None if sequence.rules is None else sequence.rules.guide
    if guide is not None and guide.error is not None:
        return f"the grammar can't go on: {guide.error}", "guided"
    if token == EMPTY:
        return nothing_left(sequence.sampling, sequence.generated) or (_BROKEN, None)
    return _BROKEN, None
