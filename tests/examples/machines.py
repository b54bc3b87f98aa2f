"""Machines for the walk-throughs: each has network, process and mount namespaces of its own, and all are on one switch.

No root is needed where the system lets users make user namespaces. Machines of one kind more need no namespaces: they are
folders of this machine, on loopback.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ADDRESSES = {"broker": "192.0.2.1", "engine": "192.0.2.2", "frontend": "192.0.2.3"}
"""As the walk-throughs have them: from the block that is kept for documentation (RFC 5737)."""

PATIENCE_S = 60.0
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "pgrep": "procps", "openssl": "openssl"}
SWITCH = ("unshare", "--user", "--map-root-user", "--net", "--")
MACHINE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")

FIRST_PROCESS = "trap '' CHLD; ip link set lo up && mount -t tmpfs none /dev/shm && echo up; exec cat"
"""Of a machine: what is left to it is reaped unseen, and all ends with it, at the latest when its input does."""

HOW_TO_PERMIT = """To permit it, run as root outside of containers, or allow user namespaces:
  sysctl -w user.max_user_namespaces=10000
  sysctl -w kernel.unprivileged_userns_clone=1                 (Debian)
  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0     (Ubuntu from 24.04 on)
  docker run --privileged ...                                  (Docker)
and load the kernel modules: modprobe -a bridge veth"""


def refusal() -> str | None:
    """Why this system makes no machines; None where it does. A program that is not installed fails the test that asks."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=SYSTEM_PATH)}
    if missing:
        pytest.fail(
            f"the walk-throughs need programs that are not installed: apt-get install {' '.join(sorted(missing))}"
        )
    attempt = (
        "ip link add switch type bridge && ip link add one type veth peer name two && exec "
        + " ".join(MACHINE)
        + " true"
    )
    done = subprocess.run(
        [*SWITCH, "sh", "-c", attempt],
        env={"PATH": SYSTEM_PATH},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode == 0:
        return None
    return f"this system permits no user and network namespaces ({done.stderr.strip()}).\n{HOW_TO_PERMIT}"


class Running:
    """A command in a session of its own; what it says, to stdout or stderr, is read as it comes."""

    def __init__(self, *command: str | Path, environ: dict[str, str], cwd: Path | None = None) -> None:
        self.popen = subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._fresh: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._fresh.put(line.rstrip("\n"))
        self._fresh.put(None)

    def line(self, timeout: float = PATIENCE_S) -> str:
        """The next line. Raises queue.Empty where there is none within `timeout` seconds."""
        line = self._fresh.get(timeout=timeout)
        assert line is not None, f"{self.popen.args} ended after {self.lines}"
        self.lines.append(line)
        return line

    def until(self, words: str, timeout: float = PATIENCE_S) -> str:
        """The next line that holds `words`."""
        deadline = time.monotonic() + timeout
        try:
            while words not in (line := self.line(max(0.0, deadline - time.monotonic()))):
                pass
        except queue.Empty:
            raise AssertionError(f"no line with {words!r} within {timeout:g} s, only {self.lines}") from None
        return line

    def quiet_for(self, seconds: float) -> float:
        """For how long it had said nothing when `seconds` were over."""
        end = time.monotonic() + seconds
        spoke = time.monotonic()
        while (left := end - time.monotonic()) > 0:
            try:
                self.line(left)
                spoke = time.monotonic()
            except queue.Empty:
                break
        return time.monotonic() - spoke

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Its exit code, once everything that it said was read."""
        code = self.popen.wait(timeout)
        while (line := self._fresh.get(timeout=timeout)) is not None:
            self.lines.append(line)
        return code

    def close(self) -> None:
        """Ends it with everything that it started in its session's group."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()


class Machine:
    """Commands in a shell, in a folder and an environment of the machine's own. `enter`: the words that lead there."""

    def __init__(self, name: str, folder: Path, programs: Path, enter: tuple[str, ...] = ()) -> None:
        self.name, self.folder = name, folder
        self._enter = enter
        self._exports: list[str] = []
        self._started: list[Running] = []
        self._environ = {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "HOME": os.fspath(folder),
            "TMPDIR": os.fspath(folder),
            "XDG_RUNTIME_DIR": os.fspath(folder),
            "MACHINES": os.fspath(folder.parent),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }

    def start(self, command: str) -> Running:
        """Runs beside everything else."""
        script = "\n".join((f"cd {self.folder}", *self._exports, command))
        running = Running(*self._enter, "bash", "-c", script, environ=self._environ)
        self._started.append(running)
        return running

    def run(self, command: str) -> str:
        """What it printed; it must succeed. An `export` holds for all that follows."""
        running = self.start(command)
        code = running.wait()
        printed = "\n".join(running.lines)
        assert code == 0, f"{self.name}$ {command}\n{printed}"
        if command.startswith("export "):
            self._exports.append(command)
        return printed

    def close(self) -> None:
        for running in self._started:
            running.close()


class Network:
    """The machines of one walk-through, and what happens to their cables. `root` has a folder for each of them."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.machines: dict[str, Machine] = {}
        self._first: dict[str, Running] = {}
        self._switch = Running(*SWITCH, "sh", "-c", "echo up; exec cat", environ={"PATH": SYSTEM_PATH})
        try:
            self._switch.until("up")
            self._in_switch("ip link add switch type bridge && ip link set switch up")
            for name in ADDRESSES:
                self._add(name, root / name, programs)
        except BaseException:
            self.close()
            raise

    def cut(self, name: str) -> None:
        """As if its cable were pulled."""
        self._in_switch(f"ip link set {name} down")

    def mend(self, name: str) -> None:
        self._in_switch(f"ip link set {name} up")

    def power_off(self, name: str) -> None:
        """All of its processes end at once, and the cable is dead."""
        self.cut(name)
        self._first[name].close()

    def close(self) -> None:
        for first in (*self._first.values(), self._switch):
            first.close()
        for machine in self.machines.values():
            machine.close()

    def _add(self, name: str, folder: Path, programs: Path) -> None:
        first = self._first[name] = Running(
            *self._enter(self._switch.popen.pid), *MACHINE, "sh", "-c", FIRST_PROCESS, environ={"PATH": SYSTEM_PATH}
        )
        first.until("up")
        pid = youngest(first.popen.pid)
        self._in_switch(f"ip link add {name} type veth peer name eth0 netns {pid}")
        self._in_switch(f"ip link set {name} master switch up")
        machine = self.machines[name] = Machine(name, folder, programs, self._enter(pid, "--mount", "--pid"))
        machine.run(f"ip address add {ADDRESSES[name]}/24 dev eth0 && ip link set eth0 up")

    def _in_switch(self, command: str) -> None:
        enter = self._enter(self._switch.popen.pid)
        subprocess.run([*enter, "sh", "-c", command], env={"PATH": SYSTEM_PATH}, timeout=PATIENCE_S, check=True)

    @staticmethod
    def _enter(pid: int, *more: str) -> tuple[str, ...]:
        return ("nsenter", "--target", str(pid), "--user", "--preserve-credentials", "--net", *more, "--")


def youngest(pid: int) -> int:
    """The last of a line of processes that have one child each."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        pid = int(children[-1])
    return pid
