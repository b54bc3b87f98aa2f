"""An engine whose every token says which request, sequence and position it is of, and that writes down what it produced."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tllm_core.contracts.interfaces import Engine, EngineContext
from tllm_core.contracts.messages import EngineInfo, EngineRequest, ErrorReport, Output, Plain, Step
from tllm_core.errors import ControlError, RequestError

from .violation import Violation

if TYPE_CHECKING:
    from tllm_core.world.worker import Worker

WELL, REJECTED, FAILING, DEADLY = range(4)
"""What becomes of a request: its second prompt token."""

INFO: Final = EngineInfo(
    model="simulated",
    vocab_size=1 << 30,
    max_seq_len=1 << 20,
    supports=frozenset({"n", "max_tokens"}),
    controls=("echo", "fail", "pause", "resume"),
)


def token_of(number: int, index: int, position: int) -> int:
    return (number << 12) + (index << 8) + position


class Model(Engine):
    """`rows_after_abort`: how likely it has one more output for a request that was aborted."""

    def __init__(self, rng: random.Random, rows_after_abort: float = 0.2) -> None:
        super().__init__(None)
        self.live: dict[int, EngineRequest] = {}
        self.produced: dict[tuple[int, int], list[int]] = {}
        self.finished: set[tuple[int, int]] = set()
        self.seen: set[int] = set()
        self.failed: set[int] = set()
        self._rng, self._rows_after_abort = rng, rows_after_abort
        self._late: list[Output] = []
        self.may_pause = True
        self.wait: Callable[[], None] = lambda: None

    def start(self, context: EngineContext) -> EngineInfo:
        return INFO

    def submit(self, request: EngineRequest) -> None:
        number, kind, _, count, *rest = request.prompt_token_ids
        if rest != list(range(number, number + count)):
            raise Violation("I2", f"the prompt of request {number} is {list(request.prompt_token_ids)}")
        if number in self.seen:
            raise Violation("I6", f"the engine got request {number} twice")
        self.seen.add(number)
        if kind == REJECTED:
            self.failed.add(number)
            raise RequestError("the simulated engine does not take it", field="prompt_token_ids")
        if kind == DEADLY:
            raise RuntimeError(f"request {number} broke the engine")
        self.live[request.request_id] = request
        for index in range(request.sampling.n):
            self.produced[number, index] = []

    def abort(self, request_id: int) -> None:
        request = self.live.pop(request_id, None)
        if request is not None and self._rng.random() < self._rows_after_abort:
            self._late.append(Output(request_id=request_id, token_ids=(1,), finish_reason="stop"))

    def resume(self, worker: Worker) -> None:
        """Nobody holds it back any more."""
        if self.paused:
            self.paused = False
            worker.wake()

    def step(self) -> Step:
        self.wait()
        if self.paused:
            return Step([], False)
        outputs, self._late = self._late, []
        for request_id, request in list(self.live.items()):
            if self._rng.random() < 0.9:
                outputs += self._advance(request_id, request)
        return Step(outputs, bool(self.live))

    def _advance(self, request_id: int, request: EngineRequest) -> list[Output]:
        number, kind, length, *_ = request.prompt_token_ids
        indexes = range(request.sampling.n)
        outputs = [
            self._grow(request_id, number, index, length) for index in indexes if (number, index) not in self.finished
        ]
        if kind == FAILING and len(self.produced[number, 0]) * 2 >= length:
            self.failed.add(number)
            outputs.append(Output(request_id=request_id, error=ErrorReport("the simulated engine failed it")))
            del self.live[request_id]
        elif all((number, index) in self.finished for index in indexes):
            del self.live[request_id]
        return outputs

    def _grow(self, request_id: int, number: int, index: int, length: int) -> Output:
        produced = self.produced[number, index]
        begin = len(produced)
        end = min(length, begin + (1 if self._rng.random() < 0.7 else self._rng.randrange(4)))
        tokens = [token_of(number, index, position) for position in range(begin, end)]
        produced += tokens
        if end < length:
            return Output(request_id=request_id, token_ids=tokens, index=index)
        self.finished.add((number, index))
        return Output(request_id=request_id, token_ids=tokens, index=index, finish_reason="length")

    def control(self, method: str, args: Sequence[Plain], ranks: Sequence[int] | None) -> Sequence[Plain]:
        if method == "fail":
            raise ControlError("it was asked to fail")
        if method in ("pause", "resume"):
            self.paused = method == "pause" and self.may_pause
        return [list(args)]
