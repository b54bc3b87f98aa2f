"""Engine names as socket files. The kernel tells a live one from a leftover: nobody listens at that any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tllm_core.errors import ConfigError, TransportError

LOCK_S, RETRY_S = 2.0, 0.005
BACKLOG = 1024


class Name:
    """A name that this process listens under. `path` is of this start alone: names come back, generations never do.

    Raises TransportError where a live engine has the name, ConfigError where nothing can be bound.
    """

    def __init__(self, directory: Path, engine: str, generation: int) -> None:
        self.path = directory / f"{_quoted(engine)}.{generation:016x}.sock"
        with _locked(directory):
            _sweep(directory, engine)
            self.listener = _listen(self.path)

    def release(self) -> None:
        """The file first: whoever finds it finds somebody there."""
        self.path.unlink(missing_ok=True)
        self.listener.close()


def private_directory(chosen: str | None) -> Path:
    """The directory of the sockets, made if it isn't there. Raises ConfigError for one that others can use."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usual = Path(runtime, "tllm-unix") if runtime else Path(tempfile.gettempdir(), f"tllm-unix-{os.geteuid()}")
    directory = Path(chosen).absolute() if chosen else usual
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"can't make {directory}: {error.strerror}; set transport.unix.directory") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} is no directory that only this user can use; chmod 700 it if it is this user's, "
            "or set transport.unix.directory to another"
        )
    return directory


def discard_dead(directory: Path) -> None:
    """Removes what dead engines left."""
    with _locked(directory):
        _sweep(directory)


def _quoted(engine: str) -> str:
    return quote(engine, safe="", errors="surrogatepass")


def _sweep(directory: Path, engine: str | None = None) -> None:
    """The directory is locked. Raises TransportError where `engine` is live."""
    for path in directory.glob("*.sock"):
        if not _is_live(path):
            path.unlink(missing_ok=True)
        elif engine is not None and path.stem.rpartition(".")[0] == _quoted(engine):
            raise TransportError(
                f"an engine named {engine!r} is already running (it listens at {path}); "
                "stop it or choose another engine name"
            )


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # such as too many that wait to be accepted
            return True
    return True


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen at {path} ({len(os.fsencode(path))} bytes): {error}; "
            "set transport.unix.directory to a short path where this user may write"
        ) from None
    return listener


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two that start at once must not both find a name free. The lock goes with the process that holds it."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TransportError(f"another process keeps {directory} locked; is it stopped?") from None
                time.sleep(RETRY_S)  # flock has no timeout
        yield
    finally:
        os.close(fd)
