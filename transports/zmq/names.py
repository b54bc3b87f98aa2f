"""Who holds an engine name on this host, and which files that leaves in the socket directory.

A holder keeps `NAME.lock` locked with flock for as long as it lives, so the kernel tells a live holder from a leftover.
Taking a name is done under a lock of the directory; there, what dead holders of any name left is removed as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tllm_core.errors import ConfigError, TransportError

LOCK = ".lock"
SOCKET = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.sock")
RETRY_S = 0.005


def private_directory(chosen: str | None) -> Path:
    """The directory of sockets and locks, made if it isn't there. Raises ConfigError where it can't be used."""
    path = Path(chosen) if chosen is not None else _default_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat() if chosen is not None else path.lstat()
    except OSError as error:
        raise ConfigError(
            f"the zmq directory {path} can't be made: {error.strerror}; set transport.zmq.directory"
        ) from None
    complaint = _complaint(status) if chosen is not None else _complaint_of_default(status)
    if complaint:
        raise ConfigError(f"the zmq directory {path} {complaint}, or set transport.zmq.directory to another")
    return path


def _complaint(status: os.stat_result) -> str | None:
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory: remove what is there"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({status.st_uid}), who could replace what is in it: give it to this one"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "can be written to by every user, who could replace what is in it: chmod o-w it"
    return None


def _complaint_of_default(status: os.stat_result) -> str | None:
    foreign = status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077
    if foreign or not stat.S_ISDIR(status.st_mode):
        return "is not a directory that only this user can use: remove it"
    return None


def _default_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime, "tllm-core")
    return Path(tempfile.gettempdir(), f"tllm-core-{os.geteuid()}")


class HeldName:
    """An engine name that this process holds on this host. Raises TransportError for one that a live engine holds."""

    def __init__(self, directory: Path, engine: str, generation: int, timeout_s: float) -> None:
        self._lock_path = directory / (quote(engine, safe="") + LOCK)
        self.socket_path = self.socket_path_of(directory, engine, generation)
        with _locked_directory(directory, timeout_s):
            self._fd = _try_lock(self._lock_path, create=True)
            if self._fd is None:
                raise TransportError(
                    f"an engine named {engine!r} is already running (it holds {self._lock_path}); "
                    "stop it or choose another engine name"
                )
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"{os.getpid()}\n".encode())
            _sweep(directory, self._lock_path)

    @staticmethod
    def socket_path_of(directory: Path, engine: str, generation: int) -> Path:
        return directory / f"{quote(engine, safe='')}.{generation:016x}.sock"

    def release(self) -> None:
        """Removes the files and gives the name up. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        self.socket_path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(fd)

    def disown(self) -> None:
        """In a forked child: leaves files and lock to the parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def discard(directory: Path, engine: str, generation: int, timeout_s: float) -> None:
    """Removes the files that a dead holder of the name left; those of a live one stay."""
    lock_path = directory / (quote(engine, safe="") + LOCK)
    socket_path = HeldName.socket_path_of(directory, engine, generation)
    with _locked_directory(directory, timeout_s):
        fd = _try_lock(lock_path, create=False)
        if fd is not None:
            lock_path.unlink(missing_ok=True)
            os.close(fd)
        if socket_path.exists() and _nobody_listens(socket_path):
            socket_path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked_directory(directory: Path, timeout_s: float) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + timeout_s
        while not _flock(fd):
            if time.monotonic() > deadline:
                raise TransportError(f"another process has kept {directory} locked for {timeout_s:g} s; is it stopped?")
            time.sleep(RETRY_S)  # flock has no timeout
        yield
    finally:
        os.close(fd)


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _try_lock(path: Path, create: bool) -> int | None:
    """A descriptor that holds the lock file, or None if somebody else does (or, without `create`, if there is none)."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            return None
        if not _flock(fd):
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)  # its holder removed it between our open and our lock


def _sweep(directory: Path, own: Path) -> None:
    """Removes the files of dead holders, this name's former ones included; the directory is locked."""
    live = set()
    for path in directory.glob("*" + LOCK):
        if path == own:
            continue
        fd = _try_lock(path, create=False)
        if fd is None:
            live.add(path.name.removesuffix(LOCK))
            continue
        path.unlink(missing_ok=True)
        os.close(fd)
    for path in directory.glob("*.sock"):
        match = SOCKET.fullmatch(path.name)
        if match and match["name"] not in live and _nobody_listens(path):
            path.unlink(missing_ok=True)


def _nobody_listens(path: Path) -> bool:
    """Asked besides the lock, for the case that somebody cleaned up the lock file of a live engine."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
