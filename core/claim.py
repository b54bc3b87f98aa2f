"""Who may write a file: a claim that one process at a time has, and that ends with it, however it ends.

It is a lock of `.NAME.lock` beside the file, which the kernel lets go with its holder; in it stands who that is. The file
itself can't be locked: it is replaced, and is not there before there is something to write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from tllm_core.contracts.interfaces import Identity
from tllm_core.errors import ConfigError
from tllm_core.world.process import identify, is_alive

WORDS_S = 1.0
"""How long a holder may take from the lock to its name in it."""
RETRY_S = 0.005
MAX_BYTES = 1024


class Held(ConfigError):
    """Somebody has the claim: `holder`, or None where the system does not tell."""

    def __init__(self, path: str, holder: Identity | None) -> None:
        who = "another process" if holder is None else f"process {holder.pid}"
        super().__init__(f"{path} is claimed by {who}")
        self.holder = holder


class Claim:
    """A claim that this process has, until `release`, or the end of the object or of the process. A path, where one is wanted.

    is_needed: asked by others of this process that want the file.

    Raises Held where another has it, also within this process; OSError where there can't be a lock beside the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.is_needed: Callable[[], bool] = lambda: True
        target = Path(self.path)
        lock = target.with_name(f".{target.name}.lock")
        fd = _take(lock, os.fspath(path))
        try:
            os.ftruncate(fd, 0)
            os.write(fd, msgspec.json.encode(identify(-1, os.getpid())))
        except OSError:
            _give_back(fd, lock)
            raise
        self._fd: int | None = fd
        self._release = weakref.finalize(self, _give_back, fd, lock)
        _ALL.add(self)

    def __fspath__(self) -> str:
        return self.path

    @property
    def is_held(self) -> bool:
        """False after `release`, and in a forked child."""
        return self._fd is not None

    def release(self) -> None:
        """Idempotent."""
        self._fd = None
        self._release()

    def disown(self) -> None:
        """In a forked child: the parent's claim is not to outlive the parent."""
        fd, self._fd = self._fd, None
        if self._release.detach() is not None and fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


_ALL: weakref.WeakSet[Claim] = weakref.WeakSet()


def _disown_all() -> None:
    for claim in list(_ALL):
        claim.disown()


os.register_at_fork(after_in_child=_disown_all)


def release_unneeded(path: str | os.PathLike[str]) -> bool:
    """Releases the claims of this process to that path which nobody needs any more. Whether there were any."""
    unneeded = [claim for claim in list(_ALL) if claim.path == os.path.abspath(path) and not claim.is_needed()]
    for claim in unneeded:
        claim.release()
    return bool(unneeded)


def _take(lock: Path, shown: str) -> int:
    """A descriptor that holds the lock, of the file that is at that path now."""
    deadline = time.monotonic() + WORDS_S
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{lock} must be a regular file, as it is a lock; remove it")
            if try_lock(fd):
                if _is_at(fd, lock):
                    kept, fd = fd, -1
                    return kept
                continue  # its holder removed it between our open and our lock
            holder = _named_in(fd)
        finally:
            if fd >= 0:
                os.close(fd)
        # What a dead holder left in the file stands there for a moment after the next one has locked it.
        if holder is not None or time.monotonic() > deadline:
            raise Held(shown, holder)
        time.sleep(RETRY_S)  # flock has no timeout, and a name in a file no event


def _give_back(fd: int, lock: Path) -> None:
    with contextlib.suppress(OSError):
        if _is_at(fd, lock):
            lock.unlink()
    os.close(fd)


def try_lock(fd: int) -> bool:
    """False where somebody else has the lock. Raises OSError where the file system knows no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(fd))
    return False


def _named_in(fd: int) -> Identity | None:
    """The process that the file names, where it lives."""
    try:
        holder = msgspec.json.decode(os.pread(fd, MAX_BYTES, 0), type=Identity)
    except msgspec.MsgspecError:
        return None
    return holder if is_alive(holder) else None
