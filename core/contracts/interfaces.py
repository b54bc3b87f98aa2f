"""What a transport, an engine and a launcher are. Implement one of these classes and name it in an entry point."""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct, field

from tllm_core.contracts.messages import Beat, EngineInfo, EngineRequest, IterationStats, Plain, Step
from tllm_core.errors import Cause, ControlError

# -------------------------------------------------------------------------------------------------- transport

Frame: TypeAlias = Sequence[Any]
"""One frame: a sequence of buffers (bytes or memoryviews). Where the transport is not CROSS_PROCESS the items after the
first may be any object and are passed by reference."""

PeerId: TypeAlias = bytes
"""16 random bytes, the first of them not 0."""


class Capability(enum.Flag):
    """What a transport can do; declared on the class, verified by the conformance suite."""

    NONE = 0
    CROSS_PROCESS = enum.auto()
    CROSS_HOST = enum.auto()
    MANY_FRONTENDS = enum.auto()
    RELIABLE = enum.auto()
    """Ordered and lossless while connected."""
    RECONNECTS = enum.auto()
    PEER_LOSS = enum.auto()
    """Reports by itself that the peer is gone."""


class EngineAddress(Struct, frozen=True, kw_only=True):
    """Where an engine listens: known after the bind, and then advertised. Holds no secret.

    `endpoints` is the transport's own: name -> address. `generation`: 64 random bits drawn by the engine at start.
    """

    transport: str
    engine: str
    generation: int
    endpoints: dict[str, str]


class PortState(Struct, frozen=True):
    """`up`: frames can be sent now. `reason` and `since` (monotonic seconds) say why not; `closed` is for good."""

    up: bool
    reason: str = ""
    since: float = 0.0
    closed: bool = False


PORT_UP = PortState(True)


class Port(ABC):
    """One end of a transport. Synchronous; every method may be called from any thread."""

    max_frame: int | None = None
    """Bytes in one frame at most, all buffers together; None = no limit."""

    @property
    @abstractmethod
    def state(self) -> PortState: ...

    @abstractmethod
    def path_ok_at(self) -> float:
        """Monotonic time of the last fresh proof that this side's own path works; `time.monotonic()` where there is no broker."""

    @abstractmethod
    def receive(self, timeout: float | None) -> Sequence[Frame]:
        """All frames that are there, at least one unless `timeout` seconds passed or `wake()` was called; then [].

        One reader at a time. Raises PortClosed once closed, also in a call that is blocked.
        """

    @abstractmethod
    def wake(self) -> None:
        """Ends one blocked or next `receive` early. From any thread; never blocks or raises."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; idempotent; a blocked `receive` raises PortClosed. Frames already taken are still sent (bounded)."""


class FrontendPort(Port):
    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Takes the frame for the engine, or raises PortFull, PortDown, FrameTooLarge or PortClosed. Never blocks."""


class EnginePort(Port):
    address: EngineAddress

    @abstractmethod
    def send(self, to: PeerId, frame: Frame) -> None:
        """Takes the frame for that frontend, or raises as FrontendPort.send does. Never blocks."""

    def forget(self, peer: PeerId) -> None:
        """Frees what is kept for a frontend whose session ended; it may come back."""


class Transport(ABC):
    """How frames travel. Constructing one does no I/O.

    It moves frames to the named peer and says when it can't; order, loss, duplicates, authentication and generations are
    the lane's work. It never reads a frame. `settings_type` is a msgspec Struct whose fields all have defaults.
    """

    name: ClassVar[str]
    settings_type: ClassVar[type[Struct]]
    capabilities: ClassVar[Capability]

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def listen(self, engine: str, generation: int) -> EnginePort:
        """Binds first; the port's `address` is what was bound. Raises TransportError for a name that a live engine holds."""

    @abstractmethod
    def connect(self, engine: EngineAddress, peer: PeerId) -> FrontendPort:
        """Opens the frontend's end; does not wait for the engine."""

    def discard(self, address: EngineAddress) -> None:  # noqa: B027 - optional
        """Removes what a dead engine left behind at this address; nothing where a live one holds it. Raises nothing."""


# ----------------------------------------------------------------------------------------------------- engine


class EngineContext(ABC):
    """What a rank may ask of the world around it. `wake`, `phase` and `adopt` may be called from any thread."""

    rank: int
    world_size: int
    rendezvous: str | None
    """host:port of a store that is already bound, for `torch.distributed`; None where there is one rank."""
    rendezvous_fd: int | None = None
    """On rank 0 the listening socket behind `rendezvous`, to be copied and served; None elsewhere, and where somebody else
    serves it."""

    @abstractmethod
    def wake(self) -> None:
        """Has `step` called soon."""

    @abstractmethod
    def phase(self, name: str, done: float | None = None) -> None:
        """Says what start-up is doing, in two to six words; `done` in [0, 1] where it is known."""

    @abstractmethod
    def adopt(self, pid: int) -> None:
        """Puts a process that the engine started itself under watch; its death is the engine's."""


class EngineCapability(enum.Flag):
    """What an engine can do; declared on the class, verified by the conformance suite."""

    NONE = 0
    DETERMINISTIC = enum.auto()
    """A greedy or seeded request gets the same tokens every time, alone or beside others."""
    SELF_DRIVEN = enum.auto()
    """Works on a thread of its own: `step` only fetches what is there, and `EngineContext.wake` asks for it."""
    MANY_RANKS = enum.auto()
    """Can be set to run as several ranks."""


class Engine(ABC):
    """Runs a model. All calls come from one thread of its rank; only start, submit, abort and step must be written.

    Constructed as `Engine(settings)` with an instance of the spec's `settings_type`.
    """

    capabilities: ClassVar[EngineCapability] = EngineCapability.NONE

    paused: bool = False
    """Set while it holds requests on purpose (a control call paused it, or put it to sleep): not a hang. Read after every step
    and control call."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def start(self, context: EngineContext) -> EngineInfo:
        """Loads. Whatever is raised here ends the world and reaches the caller with its traceback."""

    @abstractmethod
    def submit(self, request: EngineRequest) -> None:
        """Takes a request. RequestError ends this request alone; anything else that is raised is the engine's death."""

    @abstractmethod
    def abort(self, request_id: int) -> None:
        """Ends a request; afterwards the engine owes nothing for it but freeing. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> Step:
        """Does one step of work and returns what it produced. Never waits for new work."""

    def control(self, method: str, args: Sequence[Plain], ranks: Sequence[int] | None) -> Sequence[Plain]:
        """Runs one of `EngineInfo.controls` on the given ranks (None = all); returns one value per rank."""
        raise ControlError(f"this engine has no control method {method!r}")

    def stats(self) -> IterationStats:
        return IterationStats()

    def follow(self) -> None:  # noqa: B027 - optional
        """Ranks > 0: works until the world ends."""

    def close(self) -> None:  # noqa: B027 - optional
        """Frees everything; called once, also after a failed start."""


class EngineSpec(Struct, frozen=True, kw_only=True):
    """What an engine's entry point names. The module that holds it imports nothing heavy.

    load: "module:Class", imported only where the engine runs. world_size, prepare: "module:function", or None for one
    rank and nothing to prepare. `world_size(settings) -> int`; `prepare(settings, progress)` runs once per host, in a
    child, before the ranks: resolve, download, convert. `progress(name, done)` as EngineContext.phase.
    requires: third-party modules that `load` imports; where one is missing, that is told before anything starts.
    """

    name: str
    settings_type: type[Struct]
    load: str
    world_size: str | None = None
    prepare: str | None = None
    requires: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------- launcher


class Identity(Struct, frozen=True):
    """`start_time`: the process's start in clock ticks since boot (field 22 of /proc/PID/stat), 0 where unknown."""

    rank: int
    pid: int
    start_time: int = 0


class Identified(Struct, frozen=True, tag=True):
    """The first event: which processes there are. `watcher` is None where the world is this process."""

    ranks: tuple[Identity, ...]
    watcher: Identity | None = None


class Listening(Struct, frozen=True, tag=True):
    """`watcher`: where the watcher's own lane is, None where there is none."""

    address: EngineAddress
    watcher: EngineAddress | None = None


class Phase(Struct, frozen=True, tag=True):
    rank: int
    name: str
    done: float | None = None


class Ready(Struct, frozen=True, tag=True):
    info: EngineInfo


class Failed(Struct, frozen=True, tag=True):
    """The world did not get ready, or its engine raised: the last event but Exited.

    `kind`: the class name of what was raised there, such as "ModelError"; empty where nothing was.
    """

    message: str
    rank: int | None = None
    exitcode: int | None = None
    traceback: str | None = None
    stderr_tail: str | None = None
    kind: str = ""

    def cause(self) -> Cause:
        return Cause(
            self.message,
            rank=self.rank,
            exitcode=self.exitcode,
            traceback=self.traceback,
            stderr_tail=self.stderr_tail,
            kind=self.kind,
        )


class Exited(Struct, frozen=True, tag=True):
    """All processes of the world are gone. `clean`: it was told to stop. Nothing comes after it."""

    clean: bool
    message: str = ""
    rank: int | None = None
    exitcode: int | None = None
    stderr_tail: str | None = None

    def cause(self) -> Cause:
        return Cause(self.message, rank=self.rank, exitcode=self.exitcode, stderr_tail=self.stderr_tail)


class Beaten(Struct, frozen=True, tag=True):
    """A beat of the watcher, where it travels beside the lanes."""

    beat: Beat


WorldEvent: TypeAlias = Identified | Listening | Phase | Ready | Failed | Exited | Beaten


class WorldSpec(Struct, frozen=True, kw_only=True):
    """All that is needed to start an engine world; plain data, so that it can cross to another process.

    engine, transport: names or "module:Class". key: 32 random bytes. owner: the secret that lets its holder stop the world.
    watch_generation: of the watcher's own lane, drawn as `generation` is; 0 = no such lane.
    """

    engine: str
    engine_options: dict[str, Plain] = field(default_factory=dict)
    engine_name: str = "engine"
    transport: str = "zmq"
    transport_options: dict[str, Plain] = field(default_factory=dict)
    wire: dict[str, Plain] = field(default_factory=dict)
    liveness: dict[str, Plain] = field(default_factory=dict)
    key: bytes = b""
    owner: bytes = b""
    generation: int = 0
    watch_generation: int = 0


class World(ABC):
    """A running engine world. `events` has one reader; the rest may be called from any thread."""

    owned: bool = True

    @abstractmethod
    def events(self, timeout: float | None) -> Sequence[WorldEvent]:
        """What happened, in order; [] after `timeout` seconds. After Exited it returns [] at once."""

    @abstractmethod
    def wake(self) -> None:
        """Ends a blocked `events` early."""

    def path_ok_at(self) -> float:
        """When the path of its events was last proven to work, in monotonic seconds; now, where it is a pipe."""
        return time.monotonic()

    @abstractmethod
    def stop(self, timeout: float) -> bool:
        """Waits for an orderly end (the Stop message was sent before); True if the world is gone within `timeout` seconds."""

    @abstractmethod
    def kill(self) -> None:
        """Ends every process at once and frees what was kept; idempotent."""

    def describe(self) -> Mapping[str, Plain]:
        """What `tllm explain` prints: processes, pids, sockets."""
        return {}


class Launcher(ABC):
    """Who starts the engine world."""

    name: ClassVar[str]
    settings_type: ClassVar[type[Struct]]
    needs: ClassVar[Capability] = Capability.NONE
    """What the transport must be capable of."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def launch(self, spec: WorldSpec) -> World:
        """Returns before weights are loaded; `World.events` tells the rest."""


ProgressCallback: TypeAlias = Callable[[str, float | None], None]
