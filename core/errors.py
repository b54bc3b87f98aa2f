"""Every error that tllm-core raises on purpose.

TllmError
├── ConfigError                a setting, option, path or choice is wrong; the message says which and what to do
│   ├── PluginError            a transport, engine, launcher or plugin can't be found or loaded
│   └── ModelError             a model directory, file or name can't be used
├── RequestError               this request only; names the field; the engine and other requests are unharmed
├── Overloaded                 the backlog is full; submit again later
│   └── NotAdmitted            a plugin has no room for the request now
├── ControlError               a control call failed, was refused or passed its deadline
├── ResultBusyError            a second consumer iterates over one result
├── ExecutorClosedError        the executor was shut down, or belongs to the parent of this forked process
├── EngineDeadError            the engine generation is gone; `root_cause` says why
│   └── EngineStartError       it died, or gave up, before it was ready
└── TransportError             the lane between frontend and engine is lost
    ├── Refused                the engine does not take this frontend (wire version, capacity)
    ├── Expelled               the engine gave this frontend up (too slow, or silent for too long)
    ├── BrokerLost             the path is down for longer than `broker_down_after_s`
    └── PortError              what a port raises; all but PortClosed are the lane's business
        ├── PortFull           no room now
        ├── PortDown           no path now
        ├── FrameTooLarge      beyond the port's `max_frame` or the configured `max_message_bytes`
        └── PortClosed         closed by this side
"""

import signal
from collections.abc import Callable
from typing import Self, TypeVar

E = TypeVar("E", bound="TllmError")


class TllmError(Exception):
    """The root of the tree. All of it can be copied and pickled, fields included: a process pool passes it on as it is."""

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[type[Self], tuple[object, ...]], dict[str, object]]:
        # An exception's own way calls the class with `args`, which here are the message and not what the class wants.
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[E], args: tuple[object, ...]) -> E:
    return kind.__new__(kind, *args)


class ConfigError(TllmError):
    """A setting, option, path or choice is wrong."""


class PluginError(ConfigError):
    """A transport, engine, launcher or plugin can't be found or loaded."""


class ModelError(ConfigError):
    """A model directory, file or name can't be used."""


class RequestError(TllmError):
    """One request is wrong or failed; nothing else is affected.

    `field` names the offending request or sampling field, where there is one. `client_id` is set once the request had one.
    """

    def __init__(self, message: str, *, field: str | None = None, client_id: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.client_id = client_id


class Overloaded(TllmError):
    """The bounded backlog in front of the engine is full; nothing was submitted; the same call may succeed later."""

    @property
    def may_pass(self) -> bool:
        """Whether it makes sense to wait until something of this executor ends or arrives, and submit again."""
        return True


class NotAdmitted(Overloaded):
    """A plugin's admission has no room for the request; nothing was submitted. `in_flight`: requests of this executor then.

    With none in flight there is nothing whose end could make room.
    """

    def __init__(self, reason: str, in_flight: int) -> None:
        super().__init__(reason)
        self.in_flight = in_flight

    @property
    def may_pass(self) -> bool:
        return self.in_flight > 0


class ControlError(TllmError):
    """A control call failed in the engine, was refused, or passed its deadline."""


class ResultBusyError(TllmError):
    """Another consumer is iterating over this result; `result()` and `await` may be used by any number."""


class ExecutorClosedError(TllmError):
    """The executor was shut down, or belongs to the parent of this forked process."""


class Cause:
    """Why an engine generation ended: which rank, how, and its own last words.

    `exitcode` is negative for a signal, as in `subprocess`. `traceback` is the child's own, as text. `kind`: the class
    name of what was raised there, such as "ModelError"; empty where nothing was.
    """

    __slots__ = ("exitcode", "kind", "message", "rank", "stderr_tail", "traceback")

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        exitcode: int | None = None,
        traceback: str | None = None,
        stderr_tail: str | None = None,
        kind: str = "",
    ) -> None:
        self.message = message
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback
        self.stderr_tail = stderr_tail
        self.kind = kind

    @classmethod
    def of_exit(
        cls, rank: int | None, exitcode: int | None, who: str = "engine", stderr_tail: str | None = None
    ) -> Self:
        """The cause for a process that ended without saying why."""
        name = who if rank is None else f"{who} rank {rank}"
        return cls(f"{name} {describe_exit(exitcode)}", rank=rank, exitcode=exitcode, stderr_tail=stderr_tail)

    def __str__(self) -> str:
        parts = [self.message]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        elif self.stderr_tail and self.stderr_tail.strip():
            parts.append("the end of its stderr:\n" + self.stderr_tail.rstrip())
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"Cause({self.message!r}, rank={self.rank}, exitcode={self.exitcode})"


def describe_exit(exitcode: int | None) -> str:
    """`exitcode` in words; negative is a signal number, None is unknown."""
    if exitcode is None:
        return "is gone"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


class EngineDeadError(TllmError):
    """The engine generation is gone, for good; `root_cause` is the first cause that was seen."""

    def __init__(self, root_cause: Cause | str) -> None:
        self.root_cause = Cause(root_cause) if isinstance(root_cause, str) else root_cause
        super().__init__(str(self.root_cause))


class EngineStartError(EngineDeadError):
    """The engine world died, or gave up, before it was ready."""


class TransportError(TllmError):
    """The lane between this frontend and the engine is lost."""


class Refused(TransportError):
    """The engine does not take this frontend."""


class Expelled(TransportError):
    """The engine gave this frontend up."""


class BrokerLost(TransportError):
    """The path to the engine is down for longer than `broker_down_after_s`."""


class PortError(TransportError):
    """What a port raises."""


class PortFull(PortError):
    """The port has no room now."""


class PortDown(PortError):
    """The port has no path now."""


class FrameTooLarge(PortError):
    """A frame is beyond the port's `max_frame`, or a message beyond `max_message_bytes`."""


class PortClosed(PortError):
    """The port was closed by this side."""
