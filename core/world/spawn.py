"""The spawn launcher: an engine world in processes of its own on this host, under a watcher."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from tllm_core.contracts.interfaces import (
    Capability,
    EngineAddress,
    Exited,
    Failed,
    Identified,
    Identity,
    Launcher,
    Listening,
    World,
    WorldEvent,
    WorldSpec,
)
from tllm_core.contracts.messages import Plain
from tllm_core.errors import Cause, ConfigError, EngineStartError, describe_exit
from tllm_core.world.channel import Channel, End, Kill, Launch
from tllm_core.world.descriptors import is_inheritable, pipe_pair, socket_pair
from tllm_core.world.lane import discard, liveness_of
from tllm_core.world.lookout import Lookout
from tllm_core.world.process import identify, is_stopped, kill_session, open_pidfd, poll_readable, wait_gone
from tllm_core.world.rank import resolve

KILL_S = 2.0
"""How long a watcher may take to end its world before it is killed itself, which takes the ranks along."""

Seconds = Annotated[float, Meta(gt=0, le=30 * 86400)]


class SpawnSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ready_timeout_s: how long start-up may take in all, downloads included; None = no limit. stall_report_s: how long one phase
    of it may take before stderr says so, again and again; None = silence. python: the interpreter, None = this one.
    """

    ready_timeout_s: Seconds | None = 1800.0
    stall_report_s: Seconds | None = 30.0
    python: str | None = None


class SpawnLauncher(Launcher):
    """Starts `python -m tllm_core.world watcher`. The user's script is not imported anew, so it needs no main guard."""

    name: ClassVar[str] = "spawn"
    settings_type: ClassVar[type[Struct]] = SpawnSettings
    needs: ClassVar[Capability] = Capability.CROSS_PROCESS

    settings: SpawnSettings

    def launch(self, spec: WorldSpec) -> World:
        """Raises ConfigError for options that are wrong or can't cross to another process, EngineStartError where no process
        can be started. May be called from any thread; installs no signal handler."""
        launch = self._order(spec)
        try:
            msgspec.msgpack.encode(launch)
        except (TypeError, OverflowError) as error:
            raise ConfigError(
                f"engine.{spec.engine}: the options must be plain data to cross processes: {error}"
            ) from None
        return SpawnWorld(launch, self.settings.stall_report_s)

    def _order(self, spec: WorldSpec) -> Launch:
        python = self.settings.python or sys.executable
        if not python:
            raise ConfigError("launcher.spawn.python: this interpreter does not know its own path; set it")
        return Launch(
            spec=spec,
            world_size=resolve(spec).world_size,
            sys_path=[entry or os.getcwd() for entry in sys.path],
            python=python,
            owner_pid=os.getpid(),
            owner_start=identify(0, os.getpid()).start_time,
            ready_timeout_s=self.settings.ready_timeout_s,
            beat_interval_s=liveness_of(spec).beat_interval_s,
        )


class SpawnWorld(World):
    """An engine world under a watcher, as its owner holds it. In a fork of the owner every method does nothing."""

    def __init__(self, launch: Launch, stall_report_s: float | None = None) -> None:
        self._owner_pid = os.getpid()
        self._spec = launch.spec
        self._addresses: tuple[EngineAddress, ...] = ()
        ours, theirs = socket_pair()
        try:
            self._popen = _start_watcher(launch.python, theirs)
        except OSError as error:
            ours.close()
            message = f"the engine can't be started with {launch.python}: {error.strerror or error}"
            raise EngineStartError(Cause(message)) from error
        finally:
            theirs.close()
        self._pidfd = open_pidfd(self._popen.pid)
        self._watcher = identify(-1, self._popen.pid)
        self._lookout = Lookout(self._watcher, liveness_of(launch.spec).dead_after_s / 2, stall_report_s)
        self._channel: Channel[WorldEvent] = Channel(ours, WorldEvent)
        self._channel.send(launch)
        self._waker, self._wakee = _wake_pipe()
        # In this order, where more than one is held.
        self._ending, self._reading, self._descriptors = threading.Lock(), threading.Lock(), threading.Lock()
        self._ranks: tuple[Identity, ...] = ()
        self._queue: list[WorldEvent] = []
        self._lost: Exited | None = None
        self._exited = self._over = self._killed = self._leaving = self._closed = False
        self._reaping, self._is_reaped_here = threading.Lock(), True

    # ------------------------------------------------------------------------------------------------- events

    def events(self, timeout: float | None) -> Sequence[WorldEvent]:
        if os.getpid() != self._owner_pid:
            return []
        with self._reading:
            if not self._queue and not self._leaving and not self._over:
                if self._lost is None:
                    self._wait(timeout)
                self._take()
                self._look()
            events, self._queue = self._queue, []
            self._over = self._over or any(isinstance(event, Exited) for event in events)
            return events

    def _wait(self, timeout: float | None) -> None:
        poll = select.poll()
        poll.register(self._wakee, select.POLLIN)
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.pending else 0))
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        self._channel.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakee, 4096)

    def _take(self) -> None:
        if self._lost is not None:
            wait_gone(self._ranks, KILL_S)
            self._queue.append(self._lost)
            self._lost, self._exited = None, True
        if self._exited:
            return
        events = self._channel.receive()
        for event in events:
            if isinstance(event, Identified):
                self._ranks = event.ranks
            elif isinstance(event, Listening):
                self._addresses = (event.address, *([] if event.watcher is None else [event.watcher]))
            self._exited = self._exited or isinstance(event, Exited)
        self._lookout.note(events)
        self._queue += events
        if self._channel.eof and not self._exited:
            self._lose_watcher()

    def _look(self) -> None:
        failed = self._lookout.look()
        if failed is not None:
            self._queue.append(failed)

    def _lose_watcher(self) -> None:
        """The watcher is gone without a word, and its ranks with it. That is told at once; Exited when they are seen gone."""
        exitcode = self._reap()
        if self._killed:
            self._lost = Exited(clean=True, message="killed by its owner")
            return
        message = f"the engine's watcher {describe_exit(exitcode)}"
        self._queue.append(Failed(message, exitcode=exitcode))
        self._lost = Exited(False, message, exitcode=exitcode)

    def wake(self) -> None:
        with self._descriptors, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._waker, b"\0")

    # ---------------------------------------------------------------------------------------------------- end

    def stop(self, timeout: float) -> bool:
        if os.getpid() != self._owner_pid:
            return True
        self._channel.send(End())
        if not self._is_gone(timeout):
            return False
        self.kill()
        return True

    def kill(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        with self._ending:
            if self._closed:
                return
            self._killed = True
            self._channel.send(Kill())
            self._channel.shut()
            if is_stopped(self._watcher):  # going on, it ends its world more thoroughly than its death would
                self._popen.send_signal(signal.SIGCONT)
            self._reap()
            wait_gone(self._ranks, KILL_S)
            self._free()

    def _is_gone(self, timeout: float) -> bool:
        """Waits for the end of the watcher, which is the last to go."""
        with self._descriptors:
            # A copy, since another thread may close the descriptor meanwhile.
            pidfd = None if self._pidfd is None or self._closed else os.dup(self._pidfd)
        if pidfd is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(max(0.0, timeout))
            return self._popen.returncode is not None
        gone = poll_readable(pidfd, timeout)
        os.close(pidfd)
        return gone

    def _reap(self) -> int | None:
        """The watcher's exit code, None where nobody knows it; one that does not end is killed, which takes the ranks along.
        Nothing of its session survives, which is seen to before its pid, the session's number, can become another's."""
        if not self._is_gone(KILL_S):
            self._popen.kill()
            self._is_gone(KILL_S)
        with self._reaping:
            if self._popen.returncode is None:
                kill_session(self._popen.pid)
                self._is_reaped_here = self._take_exit()
        return self._popen.returncode if self._is_reaped_here else None

    def _take_exit(self) -> bool:
        """False where nobody knows how it ended: it is ignored by this process (SIGCHLD), or another waited for it."""
        try:
            _, status = os.waitpid(self._popen.pid, 0)
        except ChildProcessError:
            self._popen.wait()  # which takes this for an exit with 0
            return False
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        return True

    def _free(self) -> None:
        self._leaving = True
        self.wake()
        with self._reading:
            self._take()  # its last words, or that it left none
            self._take()
            for address in self._addresses:  # a watcher does this last, where nothing kills it before
                discard(self._spec, address)
            with self._descriptors:
                self._closed = True
                self._channel.close()
                for fd in (self._waker, self._wakee, self._pidfd):
                    if fd is not None:
                        os.close(fd)

    def describe(self) -> dict[str, Plain]:
        ranks = {f"rank {identity.rank}": identity.pid for identity in self._ranks}
        return {"launcher": "spawn", "watcher": self._popen.pid, **ranks}


def _start_watcher(python: str, sock: socket.socket) -> subprocess.Popen[bytes]:
    # -P: a file in the current directory must not hide a module. Its own session: the terminal's signals are the owner's.
    shown = is_inheritable(2)
    return subprocess.Popen(
        [python, "-P", "-m", "tllm_core.world", "watcher", str(sock.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2 if shown else subprocess.DEVNULL,
        stderr=None if shown else subprocess.DEVNULL,
        pass_fds=[sock.fileno()],
        start_new_session=True,
    )


def _wake_pipe() -> tuple[int, int]:
    reader, writer = pipe_pair()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return writer, reader
