"""What `control()` can have the tp engine do, between two steps.

pause() holds steps and keeps all requests; new ones are taken and wait; resume() goes on.
sleep(level=1) frees the memory of the KV cache, level 2 that of the weights too, of which level 1 puts a GPU's aside in the
host's memory; a CPU's are there already. It is refused while there are requests, and while it sleeps requests are
refused. wakeup() takes the memory again, and reads weights that were freed.
update_weights(path, while_running=False) replaces the weights by those of a directory; running requests go on with the new
ones, over keys and values of the old, where that is asked for, else it is refused while there are any.
reset_prefix_cache() has no request find what was computed so far, and returns how many blocks could be found; requests
that run keep theirs. reset_caches() does that and clears every block that no request owns, and returns how many were used.
start_profile(directory), stop_profile(): torch's profiler. kv_events(since=0): what became of blocks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import to_builtins

from tllm_core.contracts.messages import Plain
from tllm_core.engines.tp.kv_events import KvEventLog
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.scheduler import Scheduler
from tllm_core.errors import ConfigError, ControlError, ModelError


class PerRank(list[Plain]):
    """What each rank answered, where that differs."""


class Controlled(Protocol):
    """What controls need of the engine: whether it steps, and how many requests it has."""

    paused: bool

    @property
    def live(self) -> int: ...


class Controls:
    """Every method has all ranks do the same, and answers for all. What can't be done raises ControlError, and nothing has
    changed then."""

    def __init__(self, engine: Controlled, runner: Runner, scheduler: Scheduler, events: KvEventLog) -> None:
        self._engine, self._runner, self._scheduler, self._events = engine, runner, scheduler, events
        self._held = False
        self.asleep = 0

    def call(self, method: str, args: Sequence[Plain]) -> Plain:
        """One of METHODS. Raises ControlError, also for arguments that it does not take."""
        if method not in METHODS:
            raise ControlError(f"the tp engine has no control method {method!r}")
        try:
            return METHODS[method](self, *args)
        except (ConfigError, ModelError) as error:
            raise ControlError(str(error)) from None
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise ControlError(f"{method} does not take these arguments: {list(args)!r}") from None
            raise

    def _pause(self) -> Plain:
        self._held = True
        self._engine.paused = True
        return None

    def _resume(self) -> Plain:
        self._held = False
        self._engine.paused = bool(self.asleep)
        return None

    def _sleep(self, level: Plain = 1) -> Plain:
        if type(level) is not int or level not in (1, 2):
            raise ControlError(f"sleep has the levels 1 (free the KV cache) and 2 (and the weights), not {level!r}")
        self._refuse_while_running("sleep")
        if level > self.asleep:
            self._runner.sleep(level)
            self._scheduler.forget_prefixes()
            self._scheduler.pool.forget()
            self._scheduler.tables.suspects.clear()
            self.asleep = level
        self._engine.paused = True
        return None

    def _wakeup(self) -> Plain:
        self._runner.wakeup()
        self.asleep = 0
        self._engine.paused = self._held
        return None

    def _update_weights(self, path: Plain, while_running: Plain = False) -> Plain:
        if not isinstance(path, str) or not Path(path).expanduser().is_dir():
            raise ControlError(f"update_weights needs a directory of safetensors files, and {path!r} is none")
        if not while_running:
            self._refuse_while_running("update_weights")
        self._runner.update(Path(path).expanduser().absolute())
        self._scheduler.forget_prefixes()
        return None

    def _reset_prefix_cache(self) -> Plain:
        return self._scheduler.forget_prefixes()

    def _reset_caches(self) -> Plain:
        self._refuse_asleep("reset_caches")
        pool = self._scheduler.pool
        blocks = pool.idle()
        self._scheduler.forget_prefixes()
        if pool.used:
            self._runner.clear(blocks)
        else:
            self._runner.renew_cache()
            pool.forget()
        self._scheduler.tables.suspects.clear()
        return len(blocks)

    def _start_profile(self, directory: Plain) -> Plain:
        if not isinstance(directory, str) or not directory:
            raise ControlError(f"start_profile needs a directory for the trace, not {directory!r}")
        return PerRank(self._runner.start_profile(directory))

    def _stop_profile(self) -> Plain:
        return PerRank(self._runner.stop_profile())

    def _kv_events(self, since: Plain = 0) -> Plain:
        if type(since) is not int:
            raise ControlError(f"kv_events are asked for from a number on, not {since!r}")
        return to_builtins(self._events.since(since))

    def _refuse_while_running(self, method: str) -> None:
        if live := self._engine.live:
            raise ControlError(
                f"{method} is refused: the engine has {live} request{'s' * (live > 1)}, of all frontends together;"
                " wait for their ends or abort them first"
            )

    def _refuse_asleep(self, method: str) -> None:
        if self.asleep:
            raise ControlError(f"{method} is refused: the engine sleeps, and has no caches; call wakeup first")


METHODS: dict[str, Callable[..., Plain]] = {
    "pause": Controls._pause,
    "resume": Controls._resume,
    "sleep": Controls._sleep,
    "wakeup": Controls._wakeup,
    "update_weights": Controls._update_weights,
    "reset_prefix_cache": Controls._reset_prefix_cache,
    "reset_caches": Controls._reset_caches,
    "start_profile": Controls._start_profile,
    "stop_profile": Controls._stop_profile,
    "kv_events": Controls._kv_events,
}
