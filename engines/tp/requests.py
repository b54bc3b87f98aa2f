"""A request as the engine sees it: checked, its sequences and its times."""

import random

import numpy as np
import torch
from msgspec import Struct, field

from tllm_core.contracts.messages import EngineRequest, RequestMetrics, SamplingParams, TokenIds
from tllm_core.engines.tp.kv_hashes import root
from tllm_core.engines.tp.ranking import Ranking
from tllm_core.engines.tp.rules import Rules
from tllm_core.engines.tp.scheduler import Scheduler
from tllm_core.engines.tp.sequence import Sequence
from tllm_core.errors import RequestError


class LiveRequest(Struct, eq=False):
    """A request whose `sequences` have not all ended. Times are monotonic seconds.

    started_at, first_token_at: of the first sequence that got a token, None until then. ranking: holds the outputs of a
    `best_of` back. cached_tokens: of the prompt, found in the cache by the first sequence.
    """

    request_id: int
    sampling: SamplingParams
    prompt_tokens: int
    arrived_at: float
    sequences: list[Sequence] = field(default_factory=list)
    started_at: float | None = None
    first_token_at: float | None = None
    generated_tokens: int = 0
    preemptions: int = 0
    ranking: Ranking | None = None
    cached_tokens: int = 0

    def note_first_token(self, sequence: Sequence, now: float) -> None:
        """The first sequence's counts for the request."""
        if self.first_token_at is None:
            self.started_at, self.first_token_at = sequence.admitted_at, now
            self.cached_tokens = sequence.cached_tokens

    def end(self, sequence: Sequence, now: float) -> RequestMetrics | None:
        """Notes the end of one sequence; the last one brings the request's metrics."""
        self.sequences.remove(sequence)
        self.generated_tokens += sequence.generated
        self.preemptions += sequence.preemptions
        return None if self.sequences else self._metrics(now)

    def _metrics(self, now: float) -> RequestMetrics:
        started = self.arrived_at if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        return RequestMetrics(
            queued_s=started - self.arrived_at,
            prefill_s=first - started,
            decode_s=now - first,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
        )


class Intake:
    """Turns requests into sequences that the scheduler can take. Raises RequestError for those that can't be served."""

    def __init__(
        self,
        scheduler: Scheduler,
        vocab: int,
        eos_token_ids: tuple[int, ...],
        seed: int | None,
        *,
        grammar_ends: frozenset[int] = frozenset(),
        device: torch.device,
    ) -> None:
        """grammar_ends: the tokens that end a guided answer."""
        self._scheduler, self._vocab, self._eos = scheduler, vocab, frozenset(eos_token_ids)
        self._grammar_ends, self._device = grammar_ends, device
        self._seeds = random.Random(seed)
        self._arrivals = 0

    def accept(self, request: EngineRequest, now: float) -> LiveRequest:
        """One sequence per `n` or `best_of`, under a seed that is drawn where the request has none."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        self._check(request)
        max_len = self._scheduler.length_for(len(prompt), sampling.max_tokens)
        rules = Rules.of(sampling, self._vocab, self._device)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        live = LiveRequest(request.request_id, sampling, len(prompt), now)
        live.ranking = Ranking(sampling.n) if sampling.sequences > sampling.n else None
        stop_ids = self._stop_ids(sampling)
        chain_root = root(request.cache_salt)
        self._arrivals += 1
        for index in range(sampling.sequences):
            order = (request.priority, self._arrivals, index)
            live.sequences.append(
                Sequence(
                    prompt,
                    sampling,
                    order=order,
                    max_len=max_len,
                    seed=seed,
                    stop_ids=stop_ids,
                    request_id=live.request_id,
                    rules=rules,
                    chain_root=chain_root,
                )
            )
        return live

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(sampling.stop_token_ids)
        if sampling.guided is not None:  # whatever `ignore_eos` says: there is nothing behind a complete answer
            return stop_ids | self._eos | self._grammar_ends
        return stop_ids if sampling.ignore_eos else stop_ids | self._eos

    def _check(self, request: EngineRequest) -> None:
        sampling, prompt = request.sampling, request.prompt_token_ids
        sampling.check()
        if not len(prompt):
            raise RequestError("prompt_token_ids is empty; at least one token is needed", field="prompt_token_ids")
        self._check_id("prompt_token_ids", _largest(prompt))
        for name, largest in sampling.largest_ids():
            self._check_id(name, largest)
        for name in ("stop", "bad_words"):
            if getattr(sampling, name):
                raise RequestError(f"the tp engine knows no text; use LLM, which takes {name}", field=name)
        if request.extra is not None:
            raise RequestError("the tp engine takes no extra", field="extra")
        _check_tops(sampling, self._vocab)

    def _check_id(self, name: str, largest: int) -> None:
        if largest >= self._vocab:
            raise RequestError(
                f"{name} has the token id {largest}, and the vocabulary ends at {self._vocab - 1}", field=name
            )


def _largest(prompt: TokenIds) -> int:
    return int(np.frombuffer(prompt.view, dtype=np.uint32).max())  # what is negative is too large then


def _check_tops(sampling: SamplingParams, vocab: int) -> None:
    for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if value is not None and value > vocab:
            raise RequestError(f"{name} {value} is more than the vocabulary's {vocab} tokens", field=name)
