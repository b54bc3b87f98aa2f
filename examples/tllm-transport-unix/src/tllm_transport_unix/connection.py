"""One connected socket that carries frames: the length of a packed frame in four bytes, and then the frame."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time

from tllm_core.contracts.interfaces import Frame, PeerId
from tllm_core.contracts.packing import measure, pack, table_bytes, unpack
from tllm_core.errors import FrameTooLarge, PortDown, PortFull
from tllm_transport_unix.settings import UnixSettings

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 18
TABLE_BYTES = 1 << 16
"""What the table of a frame's buffers may add to it."""


class Connection:
    """`send` and `close` from any thread, `read` from one at a time. `peer`: whose it is, once the engine's end knows."""

    def __init__(self, connected: socket.socket, settings: UnixSettings) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.peer: PeerId = b""
        self._settings = settings
        self._unread, self._unsent = bytearray(), bytearray()
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._ended = False

    def read(self) -> list[Frame]:
        """The frames that are complete. Raises EOFError where no more will come."""
        try:
            arrived = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(error.strerror) from None
        if not arrived:
            raise EOFError("the other end closed the connection")
        self._unread += arrived
        frames, start = [], 0
        with memoryview(self._unread) as unread:
            while len(unread) >= (begin := start + LENGTH.size):
                (length,) = LENGTH.unpack_from(unread, start)
                if length > self._settings.max_frame_bytes + TABLE_BYTES:
                    raise EOFError("the other end does not speak as this transport does")
                if len(unread) < begin + length:
                    break
                start = begin + length
                frames.append(unpack(bytes(unread[begin:start])))
        del self._unread[:start]
        return frames

    def send(self, frame: Frame) -> None:
        """Takes the frame, or raises FrameTooLarge, PortFull or PortDown."""
        sizes = measure(frame)
        size, table, limit = sum(sizes), table_bytes(len(sizes)), self._settings.max_frame_bytes
        if size > limit or table > TABLE_BYTES:
            raise FrameTooLarge(f"{size} bytes in {len(sizes)} buffers are over the limit of {limit} (max_frame_bytes)")
        block = LENGTH.pack(table + size) + pack(frame, sizes)
        with self._lock:
            if self._unsent and len(self._unsent) + len(block) > self._settings.queue_bytes:
                raise PortFull(f"the peer is {len(self._unsent)} bytes behind (queue_bytes)")
            if not self._ended:
                self._unsent += block
                if self._writer is None:
                    self._write()
            if self._ended:
                raise PortDown("the other end is gone")
            if self._unsent and self._writer is None:
                self._writer = threading.Thread(target=self._write_rest, name="unix-writer", daemon=True)
                self._writer.start()

    def _write(self) -> None:
        """With the lock: hands the kernel what it has room for."""
        try:
            del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._ended = True
            self._unsent.clear()

    def _write_rest(self) -> None:
        """In a thread while the kernel has no room: what was taken goes out even if nobody sends or receives any more."""
        with selectors.PollSelector() as selector:
            selector.register(self.socket, selectors.EVENT_WRITE)
            while True:
                selector.select()
                with self._lock:
                    self._write()
                    if not self._unsent:
                        self._writer = None
                        return

    def close(self, deadline: float = 0.0) -> None:
        """Takes nothing more, sends what was taken until `deadline` (monotonic seconds), and ends the connection."""
        with self._lock:
            self._ended, writer = True, self._writer
        if writer is not None:
            writer.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)
        if writer is not None:
            writer.join()  # the shutdown ended its wait
        self.socket.close()
