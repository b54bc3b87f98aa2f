"""An engine driven directly, as the worker of a rank drives it: commands, `step`, and `wake`; all on one thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

from msgspec import structs

from tllm_core.conformance.engine.answers import Answer, check_plain
from tllm_core.conformance.engine.desk import Desk
from tllm_core.contracts.interfaces import Engine, Phase
from tllm_core.contracts.messages import (
    EngineInfo,
    EngineRequest,
    IterationStats,
    Output,
    Plain,
    SamplingParams,
    Step,
    TokenIds,
)
from tllm_core.errors import RequestError
from tllm_core.registry import load_object
from tllm_core.world.rank import Parts, RankContext
from tllm_core.world.worker import Worker

CALL_S = 20.0
"""How long one call of a running engine may take. Not a measure of speed: beyond it, something waits for what never comes."""
IDLE_S = 10.0
"""The same of a step with nothing to do."""
LOAD_S = 240.0
STALL_S = 10.0
"""How long an engine that owes something and said again=False may take to call `wake`."""
SETTLE_STEPS = 16
"""How often an engine that owes nothing may still say again=True: to free what it held."""


class Bell:
    """Stands where the worker does: hears `EngineContext.wake`."""

    def __init__(self) -> None:
        self.rung = threading.Event()
        self.count = 0
        self.threads: set[int | None] = set()

    def wake(self) -> None:
        self.count += 1
        self.threads.add(threading.get_ident())
        self.rung.set()

    def stop(self) -> None:
        """A RankContext has it."""


class Driven:
    """One engine. Every method runs on the engine's own thread and checks what comes back against the contract.

    empty_again: steps that brought nothing and said again=True.
    """

    engine: Engine
    info: EngineInfo

    def __init__(self, parts: Parts, *, on_phase: Callable[[Phase], None] | None = None) -> None:
        self.parts = parts
        self.desk, self.bell = Desk(), Bell()
        self.context = RankContext(lambda message: self._report(message, on_phase))
        self.context.attach(cast("Worker", self.bell))
        self.answers: dict[int, Answer] = {}
        self.empty_again = 0
        self.phases: list[Phase] = []
        self._ids = itertools.count(1)
        self._call(self._construct, LOAD_S, "making the engine")

    def _report(self, message: Any, on_phase: Callable[[Phase], None] | None) -> None:
        if isinstance(message, Phase):
            self.phases.append(message)
            if on_phase is not None:
                on_phase(message)

    def _construct(self) -> None:
        self.engine = load_object(self.parts.engine.load)(self.parts.settings)

    def _call(self, action: Callable[[], Any], timeout_s: float, what: str) -> Any:
        return self.desk.call(action, timeout_s, what)

    # ---------------------------------------------------------------------------------------------- the contract

    def start(self) -> EngineInfo:
        """Prepares as the world does, then `Engine.start`."""
        self.info = self._call(self._start, LOAD_S, "start")
        assert isinstance(self.info, EngineInfo), f"start must return EngineInfo, not {type(self.info).__name__}"
        return self.info

    def _start(self) -> EngineInfo:
        if self.parts.engine.prepare is not None:
            load_object(self.parts.engine.prepare)(self.parts.settings, self.context.phase)
        return self.engine.start(self.context)

    def submit(self, prompt: Iterable[int], sampling: SamplingParams, **fields: Any) -> Answer:
        """Raises RequestError as the engine does; it counts as submitted only where nothing is raised."""
        request = EngineRequest(
            request_id=next(self._ids), prompt_token_ids=TokenIds.of(prompt), sampling=sampling, **fields
        )
        self._call(_only(RequestError, lambda: self.engine.submit(request), "submit"), CALL_S, "submit")
        answer = self.answers[request.request_id] = Answer(request)
        return answer

    def abort(self, answer: Answer | int) -> None:
        request_id = answer if isinstance(answer, int) else answer.request.request_id
        self._call(_only((), lambda: self.engine.abort(request_id), "abort"), CALL_S, "abort")
        if isinstance(answer, Answer) and not answer.over:
            answer.aborted = True

    def step(self) -> Step:
        """One step, whatever it brings."""
        self.bell.rung.clear()
        step: Step = self._call(self.engine.step, CALL_S if self.owed else IDLE_S, "step")
        assert isinstance(step, Step), f"step must return a Step, not {type(step).__name__}"
        for output in step.outputs:
            self._take(output)
        self.empty_again += step.again and not step.outputs
        return step

    def _take(self, output: Output) -> None:
        answer = self.answers.get(output.request_id)
        assert answer is not None, f"an output of request {output.request_id}, which the engine never took"
        answer.take(output, self.info)

    def control(self, method: str, *args: Plain, ranks: Sequence[int] | None = None) -> Sequence[Plain]:
        values: Sequence[Plain] = self._call(
            lambda: self.engine.control(method, args, ranks), CALL_S, f"control {method!r}"
        )
        check_plain(list(values), f"what control({method!r}) returns")
        return values

    def stats(self) -> IterationStats:
        """A copy: the engine may go on with its own."""
        stats: IterationStats = self._call(self.engine.stats, CALL_S, "stats")
        return structs.replace(stats)

    def close(self) -> None:
        """Only `Engine.close`; the thread stays, so that it can be called again."""
        self._call(self.engine.close, CALL_S, "close")

    def leave(self) -> None:
        """Closes, and ends the thread."""
        try:
            self.close()
        finally:
            self.desk.close()

    def give_up(self) -> None:
        """As `leave`, after a failure that is told already: another one is not."""
        with suppress(BaseException):
            self.leave()

    # ------------------------------------------------------------------------------------------------ as a worker

    @property
    def owed(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if not answer.over]

    def advance(self) -> Step:
        """One step, after which the engine says by again=True or `wake` when it wants the next one."""
        step = self.step()
        if not step.again and self.owed:
            assert self.bell.rung.wait(STALL_S), (
                f"the engine stalls: it owes {len(self.owed)} requests, said again=False and called no wake for {STALL_S:g} s"
            )
        return step

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until nothing is owed, or `until`."""
        while self.owed and not until():
            self.advance()

    def settle(self) -> None:
        """Steps an engine that owes nothing until it says so."""
        assert not self.owed
        for _ in range(SETTLE_STEPS):
            if not self.step().again:
                return
        raise AssertionError(f"the engine owes nothing, and said again=True {SETTLE_STEPS} times: a busy loop")

    def forget(self) -> None:
        """Drops what is known of requests that are over."""
        self.answers = {answer.request.request_id: answer for answer in self.owed}

    # ------------------------------------------------------------------------------------------------- asking it

    @property
    def runs_full(self) -> bool:
        """Whether a request can be made to run until its max_tokens."""
        return not self.info.eos_token_ids or "ignore_eos" in self.info.supports

    def supports(self, *names: str) -> bool:
        return set(names) <= self.info.supports

    def sampling(self, max_tokens: int | None, **fields: Any) -> SamplingParams:
        """Parameters under which only `max_tokens` ends a request, where the engine can be told so."""
        if "ignore_eos" in self.info.supports:
            fields.setdefault("ignore_eos", True)
        return SamplingParams(max_tokens=max_tokens, **fields)

    def ask(self, requests: Iterable[tuple[Iterable[int], SamplingParams]]) -> list[Answer]:
        """Submits all, steps until all are over, and checks each end."""
        answers = [self.submit(prompt, sampling) for prompt, sampling in requests]
        self.run()
        for answer in answers:
            answer.check_whole(self.info)
        return answers


def _only(expected: type[Exception] | tuple[()], action: Callable[[], None], what: str) -> Callable[[], None]:
    """AssertionError for what else it raises, since a worker takes that for the engine's death."""

    def checked() -> None:
        try:
            action()
        except expected:
            raise
        except Exception as error:
            raise AssertionError(f"{what} raised {type(error).__name__}, which ends the engine: {error}") from error

    return checked
