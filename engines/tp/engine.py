"""The tp engine: schedule -> execute -> sample -> outputs, once per step.

The token that ends a sequence, the model's own or one of `stop_token_ids`, is not delivered unless
`include_stop_str_in_output` is set; its logprobs neither. It counts as generated.
"""

import time
from collections.abc import Sequence as AbstractSequence
from contextlib import ExitStack

import tllm_core.engines.tp.waiting  # noqa: F401 - before torch

# isort: split
import torch

from tllm_core.contracts.interfaces import Engine, EngineCapability, EngineContext
from tllm_core.contracts.messages import (
    EngineInfo,
    EngineRequest,
    ErrorReport,
    FinishReason,
    IterationStats,
    Output,
    Plain,
    SamplingParams,
    Step,
    TokenLogprobs,
)
from tllm_core.engines.tp.controls import METHODS, Controls, PerRank
from tllm_core.engines.tp.director import follow, runner_of
from tllm_core.engines.tp.guided.guidance import Guidance
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.kv_events import KvEventLog
from tllm_core.engines.tp.logprobs import token_logprobs
from tllm_core.engines.tp.requests import Intake, LiveRequest
from tllm_core.engines.tp.rules import nothing_left
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.sampler import EMPTY, Sampled, Sampler
from tllm_core.engines.tp.scheduled import Probe, PromptRows, Scheduled
from tllm_core.engines.tp.scheduler import Scheduler
from tllm_core.engines.tp.sequence import Sequence
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import RequestError

SUPPORTS = frozenset(SamplingParams.__struct_fields__) - {"stop", "bad_words", "guided"} | {"cache_salt"}
"""Prefixes are shared between requests of equal salts only; with `enable_prefix_cache = false` between none."""

_BROKEN = "the model's logits are not finite (NaN or infinity); this request can't go on"


class TpEngine(Engine):
    """Runs a model for many requests at once. Only `step` does work; nothing is shared between requests but the batch."""

    capabilities = EngineCapability.DETERMINISTIC | EngineCapability.MANY_RANKS
    settings: TpSettings
    _runner: Runner
    _scheduler: Scheduler
    _sampler: Sampler
    _intake: Intake
    _controls: Controls | None = None
    _guidance: Guidance | None = None

    def __init__(self, settings: TpSettings) -> None:
        super().__init__(settings)
        self._closers = ExitStack()
        self._live: dict[int, LiveRequest] = {}
        self._stats = IterationStats()
        self._prefill_tokens = self._decode_tokens = 0

    def start(self, context: EngineContext) -> EngineInfo:
        """Loads the model. Raises ConfigError or ModelError for what can't be loaded."""
        settings = self.settings
        self._runner = runner = runner_of(context, settings)
        self._closers.callback(runner.close)
        runner.load(context.phase)
        config = runner.config
        if context.rank:
            return EngineInfo(model=config.name)
        events = KvEventLog(settings.kv_events)
        self._scheduler = Scheduler(
            BlockPool(runner.num_blocks, settings.block_size, events),
            max_num_seqs=settings.max_num_seqs,
            max_batched_tokens=settings.max_batched_tokens,
            max_seq_len=runner.max_seq_len,
            reuse=settings.enable_prefix_cache,
            window=config.window,
        )
        self._controls = Controls(self, runner, self._scheduler, events)
        context.phase("reading the vocabulary", None)
        self._guidance = Guidance(config, context.wake, wanted=settings.guided)
        self._intake = Intake(
            self._scheduler,
            config.vocab_size,
            config.eos_token_ids,
            settings.seed,
            grammar_ends=self._guidance.end_ids,
            device=runner.device,
        )
        self._sampler = Sampler(runner.device)
        return EngineInfo(
            model=config.name,
            model_dir=config.model_dir,
            tokenizer=config.model_dir,
            vocab_size=config.vocab_size,
            max_seq_len=self._scheduler.max_seq_len,
            eos_token_ids=config.eos_token_ids,
            sampling_defaults=dict(config.generation_defaults),
            supports=SUPPORTS | self._guidance.supports,
            controls=tuple(METHODS),
        )

    def submit(self, request: EngineRequest) -> None:
        """Raises RequestError, which names the field, for what this model or cache can never serve, and while it sleeps."""
        assert self._controls is not None
        assert self._guidance is not None
        if self._controls.asleep:
            raise RequestError("the engine sleeps and takes no requests; control('wakeup') ends that")
        live = self._intake.accept(request, time.monotonic())
        waits = not self._guidance.start(live)
        self._live[request.request_id] = live
        if not waits:
            self._begin(live)

    def abort(self, request_id: int) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._drop(live)

    @torch.inference_mode()
    def step(self) -> Step:
        """Each running sequence gains a token; prompts get what is left of the step's token budget."""
        if self._runner.parted is not None:
            raise self._runner.parted  # a control call's, which answers its caller and ends no engine
        began = time.monotonic()
        outputs, generated = self._begin_compiled(), 0
        scheduled = None if self.paused else self._scheduler.schedule(began)
        if scheduled is None:
            self._sampler.forget()
            return Step(outputs, False)
        self._clear_suspects()
        logits = self._runner.execute(scheduled.batch)
        assert logits is not None
        outputs += self._note_prompts(logits, scheduled.prompt_rows)
        if scheduled.probes:
            outputs += self._note_probes(logits, scheduled.probes)
        if scheduled.sampled:
            wanted = logits if scheduled.sample_rows is None else logits[scheduled.sample_rows]
            sampled = self._sampler.sample(wanted, scheduled.sampled)
            outputs += self._advance_all(scheduled.sampled, sampled, time.monotonic())
            generated = sum(token >= 0 for token in sampled.token_ids)
        self._count(scheduled, generated, time.monotonic() - began)
        return Step(outputs, self._scheduler.pending)

    def stats(self) -> IterationStats:
        stats, scheduler, pool = self._stats, self._scheduler, self._scheduler.pool
        stats.running, stats.waiting = scheduler.running, scheduler.waiting
        stats.preemptions = scheduler.preemptions
        stats.kv_blocks_used, stats.kv_blocks_total = pool.used, pool.num_blocks
        assert self._controls is not None
        stats.extra = {
            # Computed, what was preempted again; `prompt_tokens` are those of requests, once each.
            "prefill_tokens": self._prefill_tokens,
            "decode_tokens": self._decode_tokens,
            # Looked for at every admission and found then, what was preempted again; `cached_tokens` are of prompts, once.
            "cache_queries": scheduler.tables.queries,
            "cache_hits": scheduler.tables.hits,
            "kv_blocks_cached": pool.published,
            "paused": self.paused,
            "asleep": self._controls.asleep,
        }
        return stats

    def control(self, method: str, args: AbstractSequence[Plain], ranks: AbstractSequence[int] | None) -> list[Plain]:
        """See `controls`. All ranks do it, and those that are asked have their answers returned."""
        assert self._controls is not None
        size = self.settings.tensor_parallel_size
        value = self._controls.call(method, args)
        values = value if isinstance(value, PerRank) else [value] * size
        return [values[rank] for rank in (range(size) if ranks is None else ranks)]

    def follow(self) -> None:
        """Ranks above 0: computes what rank 0 schedules. It alone samples, and knows of requests."""
        follow(self._runner)

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def close(self) -> None:
        self._live.clear()
        if self._guidance is not None:
            self._guidance.close()
        self._closers.close()

    def _begin(self, live: LiveRequest) -> None:
        self._scheduler.add(*live.sequences)

    def _begin_compiled(self) -> list[Output]:
        """Requests whose grammar has been compiled meanwhile begin now, or fail where it can't be."""
        failed: list[Output] = []
        assert self._guidance is not None
        for live, error in self._guidance.compiled(self._live):
            if error is None:
                self._begin(live)
            else:
                failed.append(self._fail(live, error, "guided"))
        return failed

    # ------------------------------------------------------------------------------------------------- outputs

    def _advance_all(self, sequences: list[Sequence], sampled: Sampled, now: float) -> list[Output]:
        outputs: list[Output] = []
        logprobs = sampled.logprobs or [None] * len(sequences)
        for sequence, token, entries in zip(sequences, sampled.token_ids, logprobs, strict=True):
            live = self._live.get(sequence.request_id)
            if live is None:
                continue  # it failed in this very step
            if token < 0:
                outputs.append(self._fail(live, *_words_of(sequence, token)))
            elif live.ranking is None:
                outputs.append(self._advance(live, sequence, token, now, entries))
            else:
                assert entries is not None
                outputs += live.ranking.take(self._advance(live, sequence, token, now, entries), entries[0].logprob)
        return outputs

    def _advance(
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

    def _fail(self, live: LiveRequest, message: str = _BROKEN, field: str | None = None) -> Output:
        """Ends one request and nothing else."""
        del self._live[live.request_id]
        self._drop(live, broken=message is _BROKEN)
        return Output(request_id=live.request_id, error=ErrorReport(message, field))

    def _drop(self, live: LiveRequest, *, broken: bool = False) -> None:
        for sequence in live.sequences:
            self._scheduler.remove(sequence, broken=broken)

    def _clear_suspects(self) -> None:
        tables = self._scheduler.tables
        if tables.suspects:
            self._runner.clear(tables.suspects)
            tables.suspects = []

    def _note_prompts(self, logits: torch.Tensor, wanted: AbstractSequence[PromptRows]) -> list[Output]:
        """Keeps the logprobs of prompt tokens until their sequence's first output; those that are broken fail now."""
        failed: list[Output] = []
        for sequence, first, length, position in wanted:
            ids = sequence.token_ids[position + 1 : position + 1 + length]
            tokens = torch.frombuffer(ids, dtype=torch.int32).to(logits.device, torch.int64)
            top = sequence.sampling.prompt_logprobs or 0
            found = token_logprobs(logits[first : first + length], tokens, [top] * length)
            if sequence.prompt_logprobs is None or None in found:
                failed.append(self._fail(self._live[sequence.request_id]))
            else:
                sequence.prompt_logprobs += [entries for entries in found if entries is not None]
        return failed

    def _note_probes(self, logits: torch.Tensor, probes: AbstractSequence[Probe]) -> list[Output]:
        """Fails those whose chunk is broken, before anybody finds it in the cache."""
        sound = torch.isfinite(logits[[probe.row for probe in probes]].amax(dim=-1)).tolist()
        broken = [sequence.request_id for (sequence, _), fine in zip(probes, sound, strict=True) if not fine]
        return [self._fail(self._live[request_id]) for request_id in broken if request_id in self._live]

    def _count(self, scheduled: Scheduled, generated: int, took_s: float) -> None:
        stats = self._stats
        stats.steps += 1
        stats.generated_tokens += generated
        self._prefill_tokens += scheduled.prompt_tokens
        self._decode_tokens += scheduled.batch.num_decodes
        stats.last_step_s = took_s


def _words_of(sequence: Sequence, token: int) -> tuple[str, str | None]:
    """Why a sequence has no token: the message, and the field that is to blame."""
    guide = None if sequence.rules is None else sequence.rules.guide
    if guide is not None and guide.error is not None:
        return f"the grammar can't go on: {guide.error}", "guided"
    if token == EMPTY:
        return nothing_left(sequence.sampling, sequence.generated) or _BROKEN, None
    return _BROKEN, None
