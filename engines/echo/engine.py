"""The echo engine itself. A step advances every running sequence by `tokens_per_step` tokens."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from tllm_core.contracts.interfaces import Engine, EngineCapability, EngineContext, ProgressCallback
from tllm_core.contracts.messages import (
    EngineInfo,
    EngineRequest,
    ErrorReport,
    IterationStats,
    Output,
    Plain,
    RequestMetrics,
    Step,
)
from tllm_core.engines.echo.faults import Faults, concerns, strike
from tllm_core.engines.echo.intake import SUPPORTS, check
from tllm_core.engines.echo.pacer import Pacer
from tllm_core.engines.echo.sequences import EchoExtra, ending_of, extra_of, outputs_of
from tllm_core.engines.echo.spec import EchoSettings
from tllm_core.errors import ControlError

MAX_N = 1024
"""A sequence's key is request_id * MAX_N + index."""


def prepare(settings: EchoSettings, progress: ProgressCallback) -> None:
    Faults(settings.faults, 0).strike("prepare")


class Live(Struct, gc=False):
    """A request that the engine still owes something, with how many of its sequences have not ended."""

    request: EngineRequest
    extra: EchoExtra
    since: float
    left: int
    begun: float = 0.0
    generated: int = 0


class EchoEngine(Engine):
    """Answers with `expected_tokens`; its only limits are those of its settings."""

    capabilities = EngineCapability.DETERMINISTIC | EngineCapability.MANY_RANKS
    settings: EchoSettings
    _context: EngineContext

    def __init__(self, settings: EchoSettings) -> None:
        super().__init__(settings)
        self._live: dict[int, Live] = {}
        self._waiting: dict[int, Live] = {}
        self._running: dict[int, Iterator[Output]] = {}
        self._stats = IterationStats()
        self.paused = False
        self._pacer: Pacer | None = None
        self._faults = Faults(settings.faults, rank=0)
        self._faults.strike("construct")

    def start(self, context: EngineContext) -> EngineInfo:
        """Takes `load_delay_s`, in which it reports its progress."""
        self._context = context
        if context.rank:
            self._faults = Faults(self.settings.faults, context.rank)
        self._faults.strike("start")
        self._load(context)
        if self.settings.step_interval_s > 0 and context.rank == 0:
            self._pacer = Pacer(self.settings.step_interval_s, context.wake)
        eos = self.settings.eos_token_id
        return EngineInfo(
            model="echo",
            vocab_size=self.settings.vocab_size,
            max_seq_len=self.settings.max_seq_len,
            eos_token_ids=() if eos is None else (eos,),
            supports=SUPPORTS,
            controls=tuple(_CONTROLS),
        )

    def _load(self, context: EngineContext) -> None:
        began = time.monotonic()
        while (gone := time.monotonic() - began) < self.settings.load_delay_s:
            context.phase("loading echo weights", gone / self.settings.load_delay_s)
            time.sleep(min(0.1, self.settings.load_delay_s - gone))

    def submit(self, request: EngineRequest) -> None:
        self._faults.strike("submit", [request.prompt_token_ids])
        check(request, self.settings)
        live = Live(request, extra_of(request), time.monotonic(), request.sampling.n)
        self._live[request.request_id] = self._waiting[request.request_id] = live

    def abort(self, request_id: int) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._faults.strike("abort", [live.request.prompt_token_ids])
        if self._waiting.pop(request_id, None) is None:
            self._stop_sequences(live)

    def step(self) -> Step:
        """Paced steps return `again=False`; the pacer's thread wakes the loop when the next one is due."""
        if self.paused or not self._live:
            return Step((), False)
        if self._pacer is not None and not self._pacer.due():
            self._pacer.arm()
            return Step((), False)
        self._admit()
        failed = self._fail_some() if "step" in self._faults.points else []
        outputs = list(map(next, self._running.values()))
        for output in outputs:
            if output.finish_reason is not None:
                self._finish(output)
        self._count(outputs)
        return Step(failed + outputs, self._go_on())

    def _count(self, outputs: list[Output]) -> None:
        self._stats.steps += 1
        if self.settings.tokens_per_step == 1:
            self._stats.generated_tokens += len(outputs)
        else:
            self._stats.generated_tokens += sum([len(output.token_ids) for output in outputs])

    def _go_on(self) -> bool:
        if self._pacer is None:
            return bool(self._live)
        self._pacer.stepped()
        if self._live:
            self._pacer.arm()
        return False

    def _admit(self) -> None:
        room = self.settings.max_batch_size - len(self._running)
        while self._waiting:
            request_id, live = next(iter(self._waiting.items()))
            if (room := room - live.left) < 0:
                break
            del self._waiting[request_id]
            live.begun = time.monotonic()
            self._stats.prompt_tokens += len(live.request.prompt_token_ids)
            for index in range(live.left):
                ending = ending_of(live.request, index, self.settings)
                live.generated += ending.length
                sequence = outputs_of(live.request, live.extra, index, ending, self.settings)
                self._running[request_id * MAX_N + index] = sequence

    def _fail_some(self) -> list[Output]:
        """Makes the faults of this step happen; those of single requests become error outputs."""
        running = [live for request_id, live in self._live.items() if request_id not in self._waiting]
        failed: list[Output] = []
        for fault in self._faults.due("step", [live.request.prompt_token_ids for live in running]):
            if fault.do != "request_error":
                strike(fault)
                continue
            for live in running:
                request_id = live.request.request_id
                if request_id in self._live and concerns(fault, live.request.prompt_token_ids):
                    del self._live[request_id]
                    self._stop_sequences(live)
                    failed.append(Output(request_id=request_id, error=ErrorReport(fault.message)))
        return failed

    def _stop_sequences(self, live: Live) -> None:
        first = live.request.request_id * MAX_N
        for key in range(first, first + live.request.sampling.n):
            self._running.pop(key, None)

    def _finish(self, output: Output) -> None:
        """Ends one sequence; the request's last one carries its metrics."""
        live = self._live[output.request_id]
        del self._running[output.request_id * MAX_N + output.index]
        live.left -= 1
        if live.left:
            return
        del self._live[output.request_id]
        output.metrics = RequestMetrics(
            queued_s=live.begun - live.since,
            decode_s=time.monotonic() - live.begun,
            prompt_tokens=len(live.request.prompt_token_ids),
            generated_tokens=live.generated,
        )

    def control(self, method: str, args: Sequence[Plain], ranks: Sequence[int] | None) -> Sequence[Plain]:
        self._faults.strike("control")
        asked = range(self.settings.world_size) if ranks is None else ranks
        value = self._call(method, args)
        return [value for _ in asked]

    def _call(self, method: str, args: Sequence[Plain]) -> Plain:
        if method not in _CONTROLS:
            raise ControlError(f"the echo engine has no control method {method!r}")
        try:
            return _CONTROLS[method](self, *args)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise ControlError(f"{method} does not take these arguments: {list(args)!r}") from None
            raise

    def stats(self) -> IterationStats:
        self._stats.extra = {"paused": self.paused}
        self._stats.waiting = len(self._waiting)
        self._stats.running = len(self._live) - len(self._waiting)
        return self._stats

    def follow(self) -> None:
        self._faults.strike("follow")
        threading.Event().wait()

    def close(self) -> None:
        self._faults.strike("close")
        if self._pacer is not None:
            self._pacer.close()

    def _ping(self, *args: Plain) -> Plain:
        return list(args)

    def _pid(self) -> Plain:
        return os.getpid()

    def _sleep_for(self, seconds: float) -> Plain:
        time.sleep(seconds)
        return None

    def _fail(self, message: str = "asked to fail") -> Plain:
        raise ControlError(message)

    def _pause(self) -> Plain:
        self.paused = True
        return None

    def _resume(self) -> Plain:
        self.paused = False
        return None


_CONTROLS: dict[str, Callable[..., Plain]] = {
    "ping": EchoEngine._ping,
    "pid": EchoEngine._pid,
    "sleep_for": EchoEngine._sleep_for,
    "fail": EchoEngine._fail,
    "pause": EchoEngine._pause,
    "resume": EchoEngine._resume,
}
