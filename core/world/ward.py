"""The rank processes as the watcher holds them: started, watched, ended."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence

from tllm_core.contracts.interfaces import Failed, Identity, Ready
from tllm_core.contracts.messages import Beat, RankState
from tllm_core.errors import describe_exit
from tllm_core.world.channel import Begin, Channel, FromRank, Launch
from tllm_core.world.descriptors import lifted_socket, pipe_pair, socket_pair
from tllm_core.world.process import LINUX, identify, kill_group, kin_cpu_s, open_pidfd, read_stat
from tllm_core.world.progress import Progress
from tllm_core.world.stacks import STACKS_SIGNAL
from tllm_core.world.stderr import Relay, Tail


class Ward:
    """One rank's process, with its channel, its stderr and a descriptor that tells its end.

    `ready`, `failed`: what it said of its engine, None before. `exitcode`: None while it lives.
    """

    def __init__(self, rank: int, python: str, relay: Relay, inherited: list[int]) -> None:
        self.rank = rank
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.exitcode: int | None = None
        self._kin_cpu_s = 0.0
        ours, theirs = socket_pair()
        reader, writer = pipe_pair()
        try:
            self._popen = _start(python, theirs.fileno(), writer, inherited)
        except OSError:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        self.channel: Channel[FromRank] = Channel(ours, FromRank)
        self.tail = Tail(reader, relay)
        self.pidfd = open_pidfd(self._popen.pid)
        self.identity: Identity = identify(rank, self._popen.pid)

    def poll(self) -> bool:
        """Whether it has ended; reaps it."""
        if self.exitcode is None:
            self.exitcode = self._popen.poll()
        return self.exitcode is not None

    def state(self) -> tuple[RankState, float]:
        """Its run state and the CPU seconds that it has used, with those of its kin as last looked at; running and 0 where the
        system does not tell."""
        if self.exitcode is not None:
            return RankState.GONE, 0.0
        stat = read_stat(self._popen.pid)
        if stat is not None:
            return stat.state, stat.cpu_s + self._kin_cpu_s
        return (RankState.GONE if LINUX else RankState.RUNNING), 0.0

    def last_words(self) -> Failed:
        """Why it ended, with what is known besides: its own report first, else how it exited."""
        exitcode, tail = self.exitcode, self.tail.text()
        if self.failed is not None:
            words = self.failed
            return Failed(words.message, self.rank, exitcode, words.traceback, tail, words.kind)
        return Failed(f"engine rank {self.rank} {describe_exit(exitcode)}", self.rank, exitcode, None, tail)

    def look_at_kin(self) -> None:
        """Asks the system what the processes that it has started itself have used; too dear for every beat."""
        if self.exitcode is None:
            self._kin_cpu_s = kin_cpu_s(self._popen.pid)

    def ask_for_stacks(self) -> bool:
        """Has it write the stacks of all its threads to its stderr; False where it can't, since it is stopped or gone."""
        if self.exitcode is not None or self.state()[0] != RankState.RUNNING:
            return False
        self._signal(STACKS_SIGNAL)
        return True

    def ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and its process group. Its pid can't be another's: it is reaped by `poll` alone."""
        if self.exitcode is None:
            kill_group(self._popen.pid)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.exitcode is None:
            self._popen.send_signal(number)

    def close(self) -> None:
        self.channel.close()
        self.tail.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


def beat_of(number: int, wards: Sequence[Ward], progress: Progress, now: float) -> Beat:
    """The state of all ranks at monotonic time `now`."""
    states = [ward.state() for ward in wards]
    steps, busy = progress.read(now)
    return Beat(number, steps, busy, tuple(state for state, _ in states), tuple(cpu_s for _, cpu_s in states))


def start_wards(launch: Launch, shared: int, relay: Relay) -> Iterator[Ward]:
    """Starts the ranks one after the other, each told what it needs. Raises OSError where the interpreter can't be executed."""
    with contextlib.ExitStack() as closers:
        store = closers.enter_context(_bind_store()) if launch.world_size > 1 else None
        for rank in range(launch.world_size):
            begin = _begin(launch, rank, shared, store)
            inherited = [fd for fd in (begin.progress_fd, begin.rendezvous_fd) if fd is not None]
            ward = Ward(rank, launch.python, relay, inherited)
            ward.channel.send(begin)
            yield ward


def _bind_store() -> socket.socket:
    """A port for the engine's rendezvous: bound before it is advertised, so that nobody else can take it."""
    return lifted_socket(socket.create_server(("127.0.0.1", 0)))


def _begin(launch: Launch, rank: int, shared: int, store: socket.socket | None) -> Begin:
    return Begin(
        spec=launch.spec,
        rank=rank,
        world_size=launch.world_size,
        sys_path=launch.sys_path,
        progress_fd=shared if rank == 0 else None,
        rendezvous=None if store is None else f"127.0.0.1:{store.getsockname()[1]}",
        rendezvous_fd=store.fileno() if store is not None and rank == 0 else None,
    )


def _start(python: str, fd: int, stderr: int, inherited: list[int]) -> subprocess.Popen[bytes]:
    # -P: a file in the current directory must not hide a module; the owner's sys.path comes over the channel.
    return subprocess.Popen(
        [python, "-P", "-m", "tllm_core.world", "rank", str(fd), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        pass_fds=[fd, *inherited],
        process_group=0,
    )
