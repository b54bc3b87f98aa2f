"""The transformers engine: its thread generates, a second one listens to it, and `step` fetches what was heard.

Everything but `_listen` runs on the rank's thread. The two share a queue, which locks by itself, and `_failure`.
"""

import queue
import threading
import time
from collections.abc import Sequence

from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from tllm_core.contracts.interfaces import Engine, EngineCapability, EngineContext
from tllm_core.contracts.messages import EngineInfo, EngineRequest, ErrorReport, IterationStats, Output, Plain, Step
from tllm_core.errors import ControlError
from tllm_engine_transformers.loading import limits_of, load_model, make_manager, tokenizer_of
from tllm_engine_transformers.requests import SUPPORTS, Limits, Live, accept
from tllm_engine_transformers.spec import TransformersSettings

LISTEN_S = 0.1
"""How often the listening thread looks whether it should end, and whether transformers' thread has."""


class TransformersEngine(Engine):
    """Any causal language model of transformers, greedy. Not DETERMINISTIC: what else is in a batch changes the rounding."""

    capabilities = EngineCapability.SELF_DRIVEN
    settings: TransformersSettings
    _context: EngineContext
    _limits: Limits
    _manager: ContinuousBatchingManager
    _listener: threading.Thread | None = None
    _failure: BaseException | None = None

    def __init__(self, settings: TransformersSettings) -> None:
        super().__init__(settings)
        self._live: dict[int, Live] = {}
        self._results: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._stats = IterationStats()

    def start(self, context: EngineContext) -> EngineInfo:
        """Raises ModelError or ConfigError for what can't be loaded."""
        self._context = context
        context.phase("loading the model")
        model = load_model(self.settings)
        self._limits = limits_of(model, self.settings)
        context.phase("making the KV cache")
        self._manager = make_manager(model, self.settings, self._limits)
        tokenizer = tokenizer_of(self.settings)
        self._manager.start()
        self._listener = threading.Thread(target=self._listen, args=(self._manager,), name="transformers-listener")
        self._listener.start()
        return EngineInfo(
            model=self.settings.model,
            tokenizer=tokenizer,
            vocab_size=self._limits.vocab_size,
            max_seq_len=self._limits.max_seq_len,
            eos_token_ids=self._limits.eos_token_ids,
            supports=SUPPORTS,
            controls=("reset_prefix_cache",),
        )

    def submit(self, request: EngineRequest) -> None:
        live = accept(request, self._limits)
        self._live[request.request_id] = live
        # Where its thread has ended meanwhile transformers drops the request: the listener says so, and `step` raises.
        self._manager.add_request(
            request.prompt_token_ids.tolist(),
            str(request.request_id),
            max_new_tokens=live.max_tokens,
            eos_token_id=sorted(live.ends),
            streaming=True,
        )

    def abort(self, request_id: int) -> None:
        """transformers frees what it holds before its next forward pass, so that this takes one pass at most."""
        if self._live.pop(request_id, None) is not None:
            self._manager.cancel_request(str(request_id))

    def step(self) -> Step:
        """Raises what ended transformers' thread, once all that came before it was fetched."""
        failure = self._failure  # before the queue, to which nothing is added once this is set
        # Results are cumulative: of each request the last one says all.
        results: dict[str, GenerationOutput] = {}
        while not self._results.empty():
            result = self._results.get_nowait()
            results[result.request_id] = result
        outputs = [output for result in results.values() if (output := self._output(result)) is not None]
        if failure is not None and not outputs:
            raise RuntimeError(f"transformers' generation thread ended: {failure!r}") from failure
        return Step(outputs, again=failure is not None)

    def _output(self, result: GenerationOutput) -> Output | None:
        """What a result adds to what was fetched before; None for a request that was aborted."""
        request_id = int(result.request_id)
        live = self._live.get(request_id)
        if live is None:
            if not result.is_finished():
                # transformers reads its queue of cancellations after that of requests: one may be missed in between.
                self._manager.cancel_request(result.request_id)
            return None
        if result.status == RequestStatus.FAILED:
            del self._live[request_id]
            return Output(request_id=request_id, error=ErrorReport(f"transformers failed it: {result.error}"))
        output = Output(request_id=request_id, token_ids=result.generated_tokens[live.sent :])
        self._count(live, len(output.token_ids))
        if result.is_finished():
            del self._live[request_id]
            self._end(output, live)
        return output

    def _count(self, live: Live, tokens: int) -> None:
        if not live.sent:
            live.first_at = time.monotonic()
            self._stats.prompt_tokens += len(live.request.prompt_token_ids)
        live.sent += tokens
        self._stats.generated_tokens += tokens

    def _end(self, output: Output, live: Live) -> None:
        """The token that ends a sequence is delivered only where that was asked for."""
        sampling, last = live.request.sampling, output.token_ids[-1]
        output.metrics = live.metrics()
        if last not in live.ends:
            output.finish_reason = "length"
            return
        output.finish_reason = "stop"
        output.stop_reason = last if last in sampling.stop_token_ids else None
        if not sampling.include_stop_str_in_output:
            output.token_ids = output.token_ids[:-1]

    def control(self, method: str, args: Sequence[Plain], ranks: Sequence[int] | None) -> Sequence[Plain]:
        """reset_prefix_cache: forgets the prefixes of requests that have ended; says whether there were any."""
        if method != "reset_prefix_cache":
            raise ControlError(f"the transformers engine has no control method {method!r}")
        if args:
            raise ControlError(f"reset_prefix_cache takes no arguments, and got {list(args)!r}")
        with self._manager.pause():  # between two forward passes
            return [self._manager.batch_processor.cache.evict_cached_blocks()]

    def stats(self) -> IterationStats:
        self._stats.running = sum(live.sent > 0 for live in self._live.values())
        self._stats.waiting = len(self._live) - self._stats.running
        return self._stats

    def close(self) -> None:
        """Waits for the forward pass that is under way."""
        self._live.clear()
        if self._listener is None:
            return
        self._closing.set()
        self._listener.join()
        self._listener = None
        self._manager.stop(hard_stop=True)
        del self._manager

    # ---------------------------------------------------------------------------------------- the listening thread

    def _listen(self, manager: ContinuousBatchingManager) -> None:
        while not self._closing.is_set():
            running = manager.is_running()  # before the queue, to which nothing is added once it is not
            results = _wait_for_results(manager)
            for result in results:
                # What is pending when the thread fails is failed by it: that is the engine's end and not a request's.
                dying = manager.background_thread_status.can_accept_new_requests() is not None
                if result.status != RequestStatus.FAILED or not dying:
                    self._results.put(result)
            if not results and not running:
                self._failure = manager.background_thread_status.fatal_error or RuntimeError("it told no reason")
                self._context.wake()
                return
            if results:
                self._context.wake()


def _wait_for_results(manager: ContinuousBatchingManager) -> list[GenerationOutput]:
    """All that are there, at least one unless LISTEN_S passed."""
    results: list[GenerationOutput] = []
    result = manager.get_result(timeout=LISTEN_S)
    while result is not None:
        results.append(result)
        result = manager.get_result(timeout=0)
    return results
