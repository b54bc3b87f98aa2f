"""What the system says of processes, and how they are tied together and ended.

Linux facts come from /proc, pidfds and prctl. Elsewhere (macOS) they are missing: states are unknown, ends are noticed by
polling, and a rank that loses its watcher ends itself when its channel closes instead of by a signal.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from tllm_core.contracts.interfaces import Identity
from tllm_core.contracts.messages import RankState
from tllm_core.world.descriptors import lifted

LINUX = sys.platform == "linux"
POLL_S = 0.02
"""How often the end of a process is looked for where there is no pidfd."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_STATES = {"T": RankState.STOPPED, "t": RankState.STOPPED, "Z": RankState.GONE, "X": RankState.GONE}


class Stat(Struct, frozen=True):
    """A process as /proc/PID/stat shows it. `cpu_s`: user and system seconds, with those of children that ended and were waited
    for. `start_time`: clock ticks since boot. `ends`: it is on its way out, whatever its state says."""

    state: RankState
    ends: bool
    session: int
    cpu_s: float
    start_time: int


def read_stat(pid: int) -> Stat | None:
    """None where the process is gone or the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold anything; the rest are fields 3 and up.
    fields = text[text.rindex(")") + 2 :].split()
    ticks = sum(map(int, fields[11:15]))
    state = _STATES.get(fields[0], RankState.RUNNING)
    if state is RankState.GONE and int(fields[17]) > 1:
        # Its main thread ended first: the others still hold its files, and it can't be reaped yet.
        state = RankState.RUNNING
    return Stat(
        state=state,
        ends=bool(int(fields[6]) & _PF_EXITING),
        session=int(fields[3]),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        start_time=int(fields[19]),
    )


def kin_cpu_s(pid: int) -> float:
    """The CPU seconds of all that the process has started and that has not ended; 0 where the system does not tell."""
    total, parents = 0.0, [pid]
    while parents:
        for child in _children(parents.pop()):
            stat = read_stat(child)
            if stat is not None:
                total += stat.cpu_s
                parents.append(child)
    return total


def _children(pid: int) -> list[int]:
    try:
        lists = [path.read_text(encoding="ascii") for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # a thread, or all of it, has just ended
        return []
    return [int(child) for text in lists for child in text.split()]


def identify(rank: int, pid: int) -> Identity:
    """The process's identity, safe against a later reuse of its pid."""
    stat = read_stat(pid)
    return Identity(rank, pid, 0 if stat is None else stat.start_time)


def host_id() -> str:
    """What two processes share that can name each other by pid: the boot and the pid namespace; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_alive(identity: Identity) -> bool:
    """Whether that very process is there and no zombie."""
    if not LINUX:
        return _answers(identity.pid)
    stat = _stat_of(identity)
    return stat is not None and stat.state is not RankState.GONE


def ends(identity: Identity) -> bool:
    """Whether that very process is gone or about to be: its files may be closed well before `is_alive` says so."""
    if not LINUX:
        return not _answers(identity.pid)
    stat = _stat_of(identity)
    return stat is None or stat.ends


def is_stopped(identity: Identity) -> bool:
    """Whether that very process stands still (SIGSTOP, or a debugger); False where the system does not tell."""
    stat = _stat_of(identity)
    return stat is not None and stat.state is RankState.STOPPED


def _stat_of(identity: Identity) -> Stat | None:
    """None where it is gone, also where a later process has its pid."""
    stat = read_stat(identity.pid)
    return stat if stat is not None and stat.start_time == identity.start_time else None


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none or it is gone."""
    try:
        return lifted(os.pidfd_open(pid))
    except (AttributeError, OSError):
        return None


def wait_gone(identities: Iterable[Identity], timeout: float) -> bool:
    """Waits until none of these processes is alive; they need not be children."""
    deadline = time.monotonic() + timeout
    for identity in identities:
        pidfd = open_pidfd(identity.pid)
        try:
            while is_alive(identity):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                _pause(pidfd, left)
        finally:
            if pidfd is not None:
                os.close(pidfd)
    return True


def _pause(pidfd: int | None, timeout: float) -> None:
    if pidfd is None:
        time.sleep(min(POLL_S, timeout))
    elif poll_readable(pidfd, timeout):
        time.sleep(0.001)  # ended, and not yet taken from the process table


def poll_readable(fd: int, timeout: float | None) -> bool:
    """Waits for one descriptor; select() would fail above descriptor 1023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))


def die_with_parent(parent: int) -> None:
    """Has the system kill this process when the thread that started it ends. Exits at once where that has happened."""
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose parent ended become children of this process, so that they can be found and ended."""
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(leader: int) -> None:
    """SIGKILL to a process group; quiet where it is gone."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session but its leader. The leader's id is safe from reuse while any of them lives."""
    if not LINUX:
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != session:
            stat = read_stat(int(entry.name))
            if stat is not None and stat.session == session and stat.state is not RankState.GONE:
                kill_process(int(entry.name))


def kill_process(pid: int) -> None:
    """SIGKILL to one process; quiet where it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
