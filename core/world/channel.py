"""Messages between the owner, the watcher and the ranks: length-prefixed msgpack over socket pairs that they inherit."""

import contextlib
import select
import socket
import threading
import time
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from tllm_core.contracts.interfaces import Failed, Listening, Phase, Ready, WorldSpec

M = TypeVar("M")


class Launch(Struct, frozen=True, tag=True, kw_only=True):
    """Owner to watcher, first: which world to start, and the parts of the launcher's settings that the watcher obeys."""

    spec: WorldSpec
    world_size: int
    sys_path: list[str]
    python: str
    owner_pid: int
    owner_start: int
    ready_timeout_s: float | None
    beat_interval_s: float


class Begin(Struct, frozen=True, tag=True, kw_only=True):
    """Watcher to rank, first."""

    spec: WorldSpec
    rank: int
    world_size: int
    sys_path: list[str]
    progress_fd: int | None
    rendezvous: str | None
    rendezvous_fd: int | None


class Go(Struct, frozen=True, tag=True):
    """Watcher to ranks above 0: what is prepared once per host is there; load."""


class End(Struct, frozen=True, tag=True):
    """Owner to watcher to rank 0: stop in an orderly way."""


class Kill(Struct, frozen=True, tag=True):
    """Owner to watcher: end everything at once."""


class Prepared(Struct, frozen=True, tag=True):
    """Rank 0 to watcher."""


class Adopted(Struct, frozen=True, tag=True):
    """Rank to watcher: a process that its engine started itself."""

    pid: int


class Leaving(Struct, frozen=True, tag=True):
    """Rank to watcher: its end is intended."""


ToWatcher = Launch | End | Kill
ToRank = Begin | Go | End
FromRank = Listening | Phase | Ready | Failed | Prepared | Adopted | Leaving


class Channel(Generic[M]):
    """One end of a socket pair. Nothing blocks but `wait` and `drain`; what can't be sent yet is kept. `send` and `drain` may be
    called from any thread, `receive` has one caller at a time."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.eof = False
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)
        self._unread = bytearray()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent)

    def send(self, message: Struct) -> None:
        """Sends as much as there is room for and keeps the rest for `flush`. A peer that is gone is no error here."""
        body = msgspec.msgpack.encode(message)
        with self._sending:
            self._unsent += len(body).to_bytes(4, "big") + body
            self._flush()

    def flush(self) -> None:
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    def drain(self, timeout: float) -> None:
        """Waits until all is sent, the peer is gone, or `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        self.flush()
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(left * 1000)
            self.flush()

    def receive(self) -> list[M]:
        """All messages that are there. Sets `eof` once the peer has closed its end, or is gone."""
        try:
            while chunk := self._sock.recv(65536):
                self._unread += chunk
            self.eof = True
        except BlockingIOError:
            pass
        except OSError:
            self.eof = True
        return self._decode()

    def _decode(self) -> list[M]:
        messages: list[M] = []
        start = 0
        while len(self._unread) >= start + 4:
            end = start + 4 + int.from_bytes(self._unread[start : start + 4], "big")
            if len(self._unread) < end:
                break
            messages.append(self._decoder.decode(self._unread[start + 4 : end]))
            start = end
        del self._unread[:start]
        return messages

    def wait(self) -> list[M]:
        """Blocks until at least one message is there; [] at the end."""
        while not self.eof:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.poll()
            if messages := self.receive():
                return messages
        return []

    def shut(self) -> None:
        """Tells the peer that no more comes; what it still sends can be received."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
