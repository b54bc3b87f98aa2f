"""The attach file: where an engine world is, its key, and who it is. Written by its owner, read by those who attach.

Whoever can read it can use the engine, so that it is made with mode 0600 and refused with any other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tllm_core.claim import Claim, Held, release_unneeded
from tllm_core.contracts.interfaces import EngineAddress, Identity
from tllm_core.contracts.messages import Plain
from tllm_core.errors import ConfigError, Refused
from tllm_core.wire.header import MIN_WIRE_VERSION, WIRE_VERSION
from tllm_core.world.process import host_id, is_alive, is_stopped

MAX_BYTES = 1 << 20
USUAL_BYTES = 1 << 14
"""More than an attach file has."""
Key = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Versions(Struct, frozen=True):
    """The only part of an attach file whose layout is frozen, so that any version can be refused in words.

    wire_versions: the lowest and the highest that the engine speaks.
    """

    wire_versions: tuple[int, int]


class AttachFile(Struct, frozen=True, kw_only=True):
    """All that an attach needs. engine, transport: names, as they were chosen. key: 32 bytes in hex.

    host: in which `ranks` and `watcher` are processes. ended_by_owner: it has been, or is about to be.

    watcher_address: None where the transport serves one frontend only. liveness: as the engine was started with.
    """

    wire_versions: tuple[int, int] = (MIN_WIRE_VERSION, WIRE_VERSION)
    engine: str
    transport: str
    address: EngineAddress
    watcher_address: EngineAddress | None = None
    key: Key
    host: str = ""
    ranks: tuple[Identity, ...] = ()
    watcher: Identity | None = None
    liveness: dict[str, Plain] = {}
    ended_by_owner: bool = False

    def __repr__(self) -> str:
        return f"AttachFile(engine={self.engine!r}, address={self.address!r})"  # never the key

    @property
    def is_here(self) -> bool:
        """Whether its processes can be seen from this one."""
        return bool(self.host) and self.host == host_id()

    @property
    def ended(self) -> Identity | None:
        """A process of the world that is gone; None where all live, or where that can't be seen from here."""
        return next((process for process in self._processes_here() if not is_alive(process)), None)

    @property
    def stopped(self) -> Identity | None:
        """A process of the world that stands still; None where none does, or where that can't be seen from here."""
        return next((process for process in self._processes_here() if is_stopped(process)), None)

    def _processes_here(self) -> list[Identity]:
        if not self.is_here:
            return []
        return [*self.ranks, *([self.watcher] if self.watcher else [])]


def write_attach_file(path: str | os.PathLike[str], content: AttachFile) -> None:
    """Puts the file there in one move, mode 0600. Raises ConfigError where that can't be done.

    It asks nobody whose attach file is there: whoever owns an engine has a claim to it first.
    """
    target = _target(path)
    try:
        with _draft(target, msgspec.json.format(msgspec.json.encode(content)) + b"\n") as draft:
            os.replace(draft, target)
    except OSError as error:
        raise ConfigError(f"the attach file {target} can't be written: {_why(target, error)}") from None


def claim_attach_file(path: str | os.PathLike[str]) -> Claim:
    """The right to write the file, for as long as the engine may run that it will name.

    Raises ConfigError where an engine that runs or starts has it, and where the file could not be written.
    """
    target = _target(path)
    try:
        claim = _claim(target)
    except Held as error:
        raise ConfigError(_taken(target, error.holder)) from None
    except OSError as error:
        raise ConfigError(f"the attach file {target} can't be claimed: {_why(target, error)}") from None
    try:
        _check_no_engine(target)
        _check_writable(target)
    except BaseException:
        claim.release()
        raise
    return claim


def _claim(target: Path) -> Claim:
    try:
        return Claim(target)
    except Held:
        if not release_unneeded(target):
            raise
    return Claim(target)


def _target(path: str | os.PathLike[str]) -> Path:
    """The path as one that a file could be put at. Raises ConfigError."""
    where = os.fspath(path)
    if not where:
        raise ConfigError("the path of the attach file is empty; name a file")
    if "\0" in where:
        raise ConfigError(f"the attach file {where!r} can't be written: its path has a NUL character in it")
    if os.path.isdir(where):
        raise ConfigError(f"the attach file {where} can't be written: it is a directory; name a file in it")
    target = Path(where)
    if os.path.lexists(target) and not _is_replaceable(target):
        raise ConfigError(
            f"the attach file {where} can't be written: something that is no attach file is there, and is left alone; "
            "name another path, or remove it"
        )
    return target


def _is_replaceable(target: Path) -> bool:
    """Only an attach file, of whatever version, and an empty file are; not a link to one either."""
    with contextlib.suppress(OSError, ConfigError), _opened(target, os.O_NOFOLLOW) as fd:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            if raw := _read(fd):
                _decode(raw, Versions, os.fspath(target))
            return True
    return False


def _why(target: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and not target.parent.is_dir():
        return f"there is no directory {target.parent}"
    return str(error.strerror)


@contextlib.contextmanager
def _draft(target: Path, content: bytes) -> Iterator[Path]:
    """The content in a file beside the target, which goes again where it was not moved. Raises OSError."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(content)
        yield draft
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _check_writable(target: Path) -> None:
    """Writes as much as an attach file may have, and takes it away: a full disk is better known before a model is loaded."""
    try:
        with _draft(target, bytes(USUAL_BYTES)):
            pass
    except OSError as error:
        raise ConfigError(f"the attach file {target} can't be written: {_why(target, error)}") from None


def remove_attach_file(path: str | os.PathLike[str], content: AttachFile) -> None:
    """Removes the file where it is still this world's."""
    with contextlib.suppress(ConfigError, Refused, OSError):
        if read_attach_file(path).address == content.address:
            os.unlink(path)


def mark_stopped(path: str | os.PathLike[str], content: AttachFile) -> None:
    """Says in the file, where it is still this world's, that its owner ends it."""
    with contextlib.suppress(ConfigError, Refused):
        if read_attach_file(path).address == content.address:
            write_attach_file(path, msgspec.structs.replace(content, ended_by_owner=True))


def is_stopped_by_owner(path: str | os.PathLike[str], content: AttachFile) -> bool:
    """Whether the file says by now that its owner ends this world."""
    with contextlib.suppress(ConfigError, Refused):
        found = read_attach_file(path)
        return found.address == content.address and found.ended_by_owner
    return False


def _check_no_engine(target: Path) -> None:
    """For an engine that still runs, though its owner is gone and with it the claim."""
    rank = _running(target)
    if rank is not None:
        raise ConfigError(_taken(target, rank))


def _running(target: Path) -> Identity | None:
    """A process of the engine that the file names, where that runs on this host."""
    with contextlib.suppress(ConfigError, Refused):
        found = read_attach_file(target)
        if found.is_here and found.ended is None and found.ranks:
            return found.ranks[0]
    return None


def _taken(target: Path, process: Identity | None) -> str:
    who = "" if process is None else f" (process {process.pid})"
    return f"the attach file {target} belongs to an engine that runs or starts{who}; stop it or choose another file"


def read_attach_file(path: str | os.PathLike[str]) -> AttachFile:
    """Raises ConfigError for a file that is not there, not private or not readable, Refused for another wire version."""
    where = os.fspath(path)
    raw = _read_private(where)
    low, high = _decode(raw, Versions, where).wire_versions
    if low > high:
        raise ConfigError(f"{where} is no attach file: its lowest wire version, {low}, is above its highest, {high}")
    if low > WIRE_VERSION or high < MIN_WIRE_VERSION:
        raise Refused(
            f"the engine of {where} speaks wire version {_span(low, high)}, this tllm-core "
            f"{_span(MIN_WIRE_VERSION, WIRE_VERSION)}; install the same tllm-core on both sides"
        )
    content: AttachFile = _decode(raw, AttachFile, where)
    for address in (content.address, content.watcher_address):
        if address is not None and not 0 <= address.generation < 1 << 64:
            raise ConfigError(f"{where} is no attach file: no engine has the generation {address.generation}")
    return content


def _read_private(where: str) -> bytes:
    try:
        with _opened(where) as fd:
            _check_private(os.fstat(fd), where)
            return _read(fd)
    except FileNotFoundError:
        raise ConfigError(f"there is no attach file {where}; is `tllm worker --attach-file` running?") from None
    except (OSError, ValueError) as error:  # some special files can be opened and not read; a NUL character in the path
        shown = where if where.isprintable() else repr(where)
        raise ConfigError(
            f"the attach file {shown} can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None


@contextlib.contextmanager
def _opened(path: str | Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int) -> bytes:
    content = b""
    while len(content) < MAX_BYTES and (more := os.read(fd, MAX_BYTES - len(content))):
        content += more
    return content


def _check_private(status: os.stat_result, where: str) -> None:
    """Raises ConfigError for what is no file of this user's alone."""
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the attach file {where} is a directory; name the file that `tllm worker` wrote")
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the attach file {where} is no regular file")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"the attach file {where} belongs to user {status.st_uid}, not to this one; it is not used")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"the attach file {where} can be used by others (mode {stat.S_IMODE(status.st_mode):04o}); "
            "it holds a key: start the engine anew, which makes it with mode 0600"
        )


def _decode(raw: bytes, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise ConfigError(f"{where} is no attach file: it is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is no attach file: {error}") from None


def _span(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
