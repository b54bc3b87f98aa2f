"""Which hooks the enabled plugins implement, looked up once, so that requests pay nothing for those that nobody does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tllm_core.contracts.messages import EngineInfo, GenerationRequest, StepBatch
from tllm_core.errors import Overloaded
from tllm_core.registry import Registry

if TYPE_CHECKING:
    from tllm_core.executor import GenerationExecutor

log = logging.getLogger("tllm_core")


class Observers:
    """Calls those who watch; one that raises is logged once and detached."""

    def __init__(self, batch: Iterable[Callable[..., Any]] = (), settled: Iterable[Callable[..., Any]] = ()) -> None:
        self.batch = list(batch)
        self.settled = list(settled)

    def on_batch(self, batch: StepBatch) -> None:
        now = time.monotonic()
        for observer in list(self.batch):
            _call(self.batch, observer, batch=batch, delivered_at=now)

    def on_settled(self, settled: Iterable[tuple[int, str]]) -> None:
        for client_id, outcome in settled:
            for observer in list(self.settled):
                _call(self.settled, observer, client_id=client_id, outcome=outcome)


def _call(group: list[Callable[..., Any]], observer: Callable[..., Any], **arguments: object) -> None:
    try:
        observer(**arguments)
    except Exception:
        group.remove(observer)
        log.exception("an observer raised and was detached: %r", observer)


class Hooks:
    """The hooks of one executor. Only plugins that were asked for (`[plugins] enable`) are there."""

    def __init__(self, registry: Registry) -> None:
        self._relay = registry.hooks
        self.observers = Observers(self._implemented("tllm_batch_delivered"), self._implemented("tllm_request_settled"))
        self._admits = self._has("tllm_admit")
        self._filters_requests = self._has("tllm_filter_request")
        self._filters_results = self._has("tllm_filter_result")

    def _has(self, name: str) -> bool:
        return bool(getattr(self._relay, name).get_hookimpls())

    def _implemented(self, name: str) -> list[Callable[..., Any]]:
        return [_subset(impl.function, impl.argnames) for impl in reversed(getattr(self._relay, name).get_hookimpls())]

    def request(self, request: GenerationRequest, info: EngineInfo, in_flight: int) -> GenerationRequest:
        """The request as it is submitted. Raises Overloaded where a plugin does not admit it."""
        if self._admits and (reason := self._relay.tllm_admit(request=request, in_flight=in_flight)) is not None:
            raise Overloaded(reason)
        if not self._filters_requests:
            return request
        return self._relay.tllm_filter_request(request=request, info=info) or request

    def result_filters(self, request: GenerationRequest) -> list[Callable[[Any], None]]:
        if not self._filters_results:
            return []
        return [found for found in self._relay.tllm_filter_result(request=request) if found is not None]

    def started(self, executor: GenerationExecutor) -> None:
        self._relay.tllm_executor_started(executor=executor)

    def stopped(self, executor: GenerationExecutor) -> None:
        self._relay.tllm_executor_stopped(executor=executor)


def _subset(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Takes all of a hook's arguments and passes on those that the implementation has."""
    wanted = tuple(names)
    return lambda **arguments: function(**{name: arguments[name] for name in wanted})
