"""Control calls: only what the engine declares, and an error is an answer."""

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs, to_builtins

from tllm_core.contracts.interfaces import Engine
from tllm_core.contracts.messages import Control, ControlReply, EngineInfo, Plain
from tllm_core.errors import ControlError, RequestError

log = logging.getLogger(__name__)

STATS = "stats"
"""The control method that the worker answers for every engine: `Engine.stats()`, with the worker's own counts."""

WORKER_SUPPORTS = frozenset({"timeout_s", "streaming", "priority", "trace_context"})
"""Request fields that the worker honours for every engine, or that are hints."""


def declared(info: EngineInfo) -> EngineInfo:
    """An engine's own words and what the worker adds to them."""
    controls = tuple(dict.fromkeys((*info.controls, STATS)))
    return structs.replace(info, supports=info.supports | WORKER_SUPPORTS, controls=controls)


class Calls:
    """Answers control calls for one engine."""

    def __init__(
        self, engine: Engine, info: EngineInfo, world_size: int, counts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._engine, self._world_size, self._counts = engine, world_size, counts
        self._methods = (*info.controls, *(() if STATS in info.controls else (STATS,)))

    def answer(self, command: Control) -> ControlReply:
        """Runs the call; what it raises becomes the reply's `error`."""
        try:
            return ControlReply(command.call_id, self._call(command))
        except (ControlError, RequestError) as error:
            return ControlReply(command.call_id, error=str(error))
        except Exception as error:
            log.exception("control call %s failed", command.method)
            return ControlReply(command.call_id, error=f"{type(error).__name__}: {error}")

    def _call(self, command: Control) -> Sequence[Plain]:
        if command.method not in self._methods:
            known = ", ".join(self._methods)
            raise ControlError(f"this engine has no control method {command.method!r}; it has: {known}")
        wrong = [rank for rank in command.ranks or () if not 0 <= rank < self._world_size]
        if wrong:
            raise ControlError(f"there is no rank {wrong[0]}: the world has {self._world_size}")
        if command.method == STATS:
            return [self._stats()]
        return self._engine.control(command.method, command.args, command.ranks)

    def _stats(self) -> Plain:
        stats = self._engine.stats()
        return to_builtins(structs.replace(stats, extra={**stats.extra, "worker": dict(self._counts())}))
