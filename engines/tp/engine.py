"""The tp engine: schedule -> execute -> sample -> outputs, once per step."""

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
    IterationStats,
    Output,
    Plain,
    SamplingParams,
    Step,
)
from tllm_core.engines.tp.controls import METHODS, Controls, PerRank
from tllm_core.engines.tp.director import follow, runner_of
from tllm_core.engines.tp.guided.guidance import Guidance
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.kv_events import KvEventLog
from tllm_core.engines.tp.outcomes import Outcomes
from tllm_core.engines.tp.requests import Intake, LiveRequest
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.sampler import Sampler
from tllm_core.engines.tp.scheduled import Scheduled
from tllm_core.engines.tp.scheduler import Scheduler
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import RequestError

SUPPORTS = frozenset(SamplingParams.__struct_fields__) - {"stop", "bad_words", "guided"} | {"cache_salt"}
"""Prefixes are shared between requests of equal salts only; with `enable_prefix_cache = false` between none."""


class TpEngine(Engine):
    """Runs a model for many requests at once. Only `step` does work; nothing is shared between requests but the batch."""

    capabilities = EngineCapability.DETERMINISTIC | EngineCapability.MANY_RANKS
    settings: TpSettings
    _runner: Runner
    _scheduler: Scheduler
    _sampler: Sampler
    _outcomes: Outcomes
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
        self._outcomes = Outcomes(self._live, self._scheduler, self._stats)
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
            self._outcomes.drop(live)

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
        outputs += self._outcomes.note_prompts(logits, scheduled.prompt_rows)
        if scheduled.probes:
            outputs += self._outcomes.note_probes(logits, scheduled.probes)
        if scheduled.sampled:
            wanted = logits if scheduled.sample_rows is None else logits[scheduled.sample_rows]
            sampled = self._sampler.sample(wanted, scheduled.sampled)
            outputs += self._outcomes.advance(scheduled.sampled, sampled, time.monotonic())
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
                failed.append(self._outcomes.fail(live, error, "guided"))
        return failed

    def _clear_suspects(self) -> None:
        tables = self._scheduler.tables
        if tables.suspects:
            self._runner.clear(tables.suspects)
            tables.suspects = []

    def _count(self, scheduled: Scheduled, generated: int, took_s: float) -> None:
        stats = self._stats
        stats.steps += 1
        stats.generated_tokens += generated
        self._prefill_tokens += scheduled.prompt_tokens
        self._decode_tokens += scheduled.batch.num_decodes
        stats.last_step_s = took_s
