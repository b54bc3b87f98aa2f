"""A directory for one process, which goes with it; where it was killed, the next one takes it away.

Its owner keeps the directory locked with flock for as long as it lives, so that the kernel tells it from one that was left.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tllm_core.claim import try_lock

PREFIX = "tllm-worker-"


@contextlib.contextmanager
def private_place() -> Iterator[Path]:
    """A new directory that only this user can enter, held while the context lasts and removed after it."""
    sweep()
    path, fd = _make()
    try:
        yield path
    finally:
        _remove(path, fd)
        os.close(fd)


def sweep() -> None:
    """Removes what killed processes of this user have left; quiet about what it can't."""
    for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.geteuid() and try_lock(fd):
                    _remove(path, fd)
            finally:
                os.close(fd)


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process swept it before it was locked
        if try_lock(fd) and os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


def _remove(path: Path, fd: int) -> None:
    """With the lock: removes it and what it holds, which are files, and nothing but its owner's."""
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
        path.rmdir()
