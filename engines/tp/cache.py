"""Directories that are made once per host: whole or not there, however many processes ask and however they end."""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tllm_core.errors import ConfigError, ModelError

Progress = Callable[[str, float | None], None]
Fill = Callable[[Path, Path], None]

_STAMP = ".complete"


def default_cache_dir() -> Path:
    """`$TLLM_CACHE`, else `$XDG_CACHE_HOME/tllm`, else `~/.cache/tllm`."""
    own = os.environ.get("TLLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "tllm"


def require_room(directory: Path, needed: int, what: str) -> None:
    """Raises ModelError where `directory`'s file system has less than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise _no_room(directory, f"{what} needs {_mb(needed)}, {_mb(free)} are free")


class CacheEntry:
    """One directory of the cache. `key`: what its content was made from; another key makes it anew.

    Beside the content lies a stamp with the key and a checksum of each file, written last. Work goes on in a scratch
    directory on the same file system, under an exclusive lock, and one rename publishes it.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.key = directory, key

    def get(self, fill: Fill, progress: Progress) -> Path:
        """The directory, made by `fill(target, scratch)` first if need be. Raises ModelError or ConfigError."""
        if self._complete():
            return self.directory
        with self._locked(progress):
            if not self._complete():
                self._make(fill, progress)
        return self.directory

    def _complete(self) -> bool:
        """Whether the stamp fits the key and the files' names and sizes; reading half a gigabyte each start is too slow."""
        try:
            key, *files = (self.directory / _STAMP).read_text().splitlines()
            sizes = [(line.split(" ", 2)[2], int(line.split(" ", 2)[1])) for line in files]
            return key == self.key and all((self.directory / name).stat().st_size == size for name, size in sizes)
        except (OSError, ValueError, IndexError):
            return False

    def _make(self, fill: Fill, progress: Progress) -> None:
        scratch = self._aside("making")
        try:
            target = scratch / "content"
            target.mkdir(parents=True)
            fill(target, scratch)
            progress("checking what was written", None)
            (target / _STAMP).write_text("\n".join([self.key, *_checksums(target)]) + "\n")
            _sync(target)
            if self.directory.exists():
                shutil.rmtree(self.directory)
            target.rename(self.directory)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(
                    self.directory.parent, "it became full half-way, and what was written is removed"
                ) from None
            raise ModelError(f"can't write to the cache {self.directory.parent}: {error}") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _locked(self, progress: Progress) -> Iterator[None]:
        """Holds the entry's lock file, which the kernel frees however the holder ends; what it left behind is removed."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            lock = self._aside("lock").open("a")
        except OSError as error:
            raise ConfigError(
                f"the cache directory {self.directory.parent} can't be used ({error.strerror}); set TLLM_CACHE to another"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another process that prepares this model", None)
                fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(self._aside("making"), ignore_errors=True)
            yield

    def _aside(self, purpose: str) -> Path:
        return self.directory.parent / f".{self.directory.name}.{purpose}"


def _no_room(directory: Path, why: str) -> ModelError:
    return ModelError(f"no room in {directory}: {why}; free some, or set TLLM_CACHE to a directory on another disk")


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _checksums(directory: Path) -> list[str]:
    lines = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest} {path.stat().st_size} {path.relative_to(directory)}")
    return lines


def _sync(directory: Path) -> None:
    """The stamp must not outlive the content in a power failure."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
