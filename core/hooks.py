"""Which hooks the enabled plugins implement, looked up once, so that requests pay nothing for those that nobody does.

Who watches is harmless: what raises there is logged once and not called again. Who decides about a request is not skipped: what
raises there refuses that request, with an error that names the plugin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from tllm_core.contracts.messages import EngineInfo, GenerationRequest, StepBatch
from tllm_core.errors import NotAdmitted, Overloaded, PluginError, TllmError
from tllm_core.registry import Registry
from tllm_core.registry.interrupts import is_of_signal
from tllm_core.registry.words import cause

if TYPE_CHECKING:
    from tllm_core.executor import GenerationExecutor

log = logging.getLogger("tllm_core")


class Observers:
    """Calls those who watch; one that raises is logged once and detached. From any threads at once."""

    def __init__(self, batch: Iterable[Callable[..., Any]] = (), settled: Iterable[Callable[..., Any]] = ()) -> None:
        self.batch = list(batch)
        self.settled = list(settled)
        self._lock = threading.Lock()

    def on_batch(self, batch: StepBatch) -> None:
        now = time.monotonic()
        for observer in list(self.batch):
            self._call(self.batch, observer, batch=batch, delivered_at=now)

    def on_settled(self, settled: Iterable[tuple[int, str]]) -> None:
        for client_id, outcome in settled:
            for observer in list(self.settled):
                self._call(self.settled, observer, client_id=client_id, outcome=outcome)

    def _call(self, group: list[Callable[..., Any]], observer: Callable[..., Any], **arguments: object) -> None:
        try:
            observer(**arguments)
        except BaseException as error:  # SystemExit too: it would end the thread that reads for everybody
            if is_of_signal(error):
                raise
            if self._detach(group, observer):
                log.exception("an observer raised and was detached: %s", observer)

    def _detach(self, group: list[Callable[..., Any]], observer: Callable[..., Any]) -> bool:
        """Whether it was still attached: two threads may find it out at once."""
        with self._lock:
            attached = observer in group
            if attached:
                group.remove(observer)
            return attached


class Implementation:
    """What one plugin does for one hook. It is called with all of the hook's arguments, and passes on those that it takes."""

    def __init__(self, hook: str, found: pluggy.HookImpl) -> None:
        self._hook = hook
        self._plugin = found.plugin_name
        self._function = found.function
        self._names = found.argnames

    def __call__(self, **arguments: object) -> Any:
        return self._function(*(arguments[name] for name in self._names))

    def __str__(self) -> str:
        return f"{self._hook} of {self._plugin}"

    def ask(self, **arguments: object) -> Any:
        """Its answer about one request. Our own errors go to the caller as they are; others as PluginError."""
        try:
            return self(**arguments)
        except TllmError:
            raise
        except (Exception, SystemExit) as error:
            if is_of_signal(error):
                raise
            raise PluginError(f"{self} raised {cause(error)}; the request was not taken") from error

    def tell(self, **arguments: object) -> None:
        """Whatever it raises is logged, and no more."""
        try:
            self(**arguments)
        except (Exception, SystemExit) as error:
            if is_of_signal(error):
                raise
            log.exception("%s raised", self)

    def wrong(self, answer: object, wanted: str) -> PluginError:
        """The error for an answer that can't be used."""
        return PluginError(f"{self} returned {answer!r}, not {wanted}; the request was not taken")


class Hooks:
    """The hooks of one executor. Only plugins that were asked for (`[plugins] enable`) are there."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.observers = Observers(self._all("tllm_batch_delivered"), self._all("tllm_request_settled"))
        self._admits = self._all("tllm_admit")
        self._request_filters = self._all("tllm_filter_request")
        self._result_filters = self._all("tllm_filter_result")

    def _all(self, hook: str) -> Sequence[Implementation]:
        """In the order in which they are called: pluggy keeps the last first."""
        found = getattr(self._registry.hooks, hook).get_hookimpls()
        return [Implementation(hook, implementation) for implementation in reversed(found)]

    def request(self, request: GenerationRequest, info: EngineInfo, in_flight: int) -> GenerationRequest:
        """The request as it is submitted.

        Raises NotAdmitted where a plugin has no room for it, what a plugin refuses it with, and PluginError for one that fails.
        """
        for admit in self._admits:
            self._ask(admit, request, in_flight)
        for filter_request in self._request_filters:
            if (other := filter_request.ask(request=request, info=info)) is not None:
                if not isinstance(other, GenerationRequest):
                    raise filter_request.wrong(other, "a GenerationRequest or None")
                return other
        return request

    def _ask(self, admit: Implementation, request: GenerationRequest, in_flight: int) -> None:
        try:
            reason = admit.ask(request=request, in_flight=in_flight)
        except Overloaded as error:  # as good a way to say it
            raise NotAdmitted(str(error), in_flight) from error
        if reason is not None:
            raise NotAdmitted(reason, in_flight) if isinstance(reason, str) else admit.wrong(reason, "a reason or None")

    def result_filters(self, request: GenerationRequest) -> list[Callable[[Any], None]]:
        """What is to see each update of the request's result. Raises as `request` does."""
        filters = []
        for implementation in self._result_filters:
            if (found := implementation.ask(request=request)) is not None:
                if not callable(found):
                    raise implementation.wrong(found, "a callable or None")
                filters.append(found)
        return filters

    def started(self, executor: GenerationExecutor) -> None:
        """Tells that the executor takes requests."""
        for implementation in self._all("tllm_executor_started"):
            implementation.tell(executor=executor)

    def stopped(self, executor: GenerationExecutor) -> None:
        """Tells that nothing is pending any more."""
        for implementation in self._all("tllm_executor_stopped"):
            implementation.tell(executor=executor)
