"""A TCP proxy on loopback that can be cut, frozen, slowed and made to corrupt: the network's faults on demand."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

READ_BYTES = 1 << 16
PENDING_BYTES = 1 << 18
"""What a flow holds at most before it reads no more; with `delay_s`, a flow passes this much per delay."""
SLICES_PER_S = 50
RESET = struct.pack("ii", 1, 0)


class CutProxy:
    """Passes connections to `127.0.0.1:port` on to a target, until it is told to do otherwise. One thread of its own.

    Every method may be called from any thread and has taken effect when it returns. To be closed, or used by `with`;
    whatever else is asked of a closed one raises RuntimeError.
    delay_s, bytes_per_s: may be set at any time; each holds per connection and direction.
    accepted: connections so far. moved: bytes passed on so far, both directions together.
    """

    host = "127.0.0.1"

    def __init__(
        self, target_host: str, target_port: int, *, delay_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.accepted = self.moved = 0
        self._target = socket.getaddrinfo(target_host, target_port, type=socket.SOCK_STREAM)[0]
        self._bound = _bound(self.host, 0)  # never listens: it keeps the port while the proxy is cut
        self.port: int = self._bound.getsockname()[1]
        self._listener: socket.socket | None = None
        self._flows: list[Flow] = []
        self._frozen = self._ends = self._closed = False
        self._corrupt = 0
        self._ordering = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._listen()
        self._thread = threading.Thread(target=self._run, name=f"cut-proxy-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> CutProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------- orders

    def cut(self) -> None:
        """Resets every connection and refuses new ones, until `heal`."""
        self._order(self._cut)

    def heal(self) -> None:
        """Accepts connections again, on the same port."""
        self._order(self._listen)

    def freeze(self) -> None:
        """Moves nothing, in either direction, and says nothing: also no end that one side sees. Accepts connections."""
        self._order(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> None:
        """Goes on after `freeze`, with what came meanwhile."""
        self._order(lambda: setattr(self, "_frozen", False))

    def corrupt(self, count: int = 1) -> None:
        """Inverts the next `count` bytes that arrive, in whichever direction they go."""
        self._order(lambda: setattr(self, "_corrupt", count))

    def close(self) -> None:
        """Resets every connection and ends the thread. Idempotent."""
        with self._ordering:
            if self._closed:
                return
            self._closed = True
            self._wake_for(lambda: setattr(self, "_ends", True))
            self._thread.join()
            # Here and not by the thread: traffic may let it obey, and end, before the order's own byte is sent.
            for end in (self._bound, self._woken, self._waker):
                end.close()

    def _order(self, action: Callable[[], None]) -> None:
        with self._ordering:
            if self._closed:
                raise RuntimeError("the proxy is closed")
            done = self._wake_for(action)
            while not done.wait(0.1):
                if not self._thread.is_alive():
                    raise RuntimeError("the proxy's thread has ended")

    def _wake_for(self, action: Callable[[], None]) -> threading.Event:
        done = threading.Event()
        self._orders.put((action, done))
        self._waker.send(b"\0")
        return done

    # ------------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        try:
            while not self._ends:
                self._round()
        finally:
            self._cut()

    def _round(self) -> None:
        now = time.monotonic()
        wanted = {self._woken.fileno(): select.POLLIN}
        if self._listener is not None:
            wanted[self._listener.fileno()] = select.POLLIN
        for flow in () if self._frozen else self._flows:
            for end, events in flow.wants(now):
                wanted[end.fileno()] = wanted.get(end.fileno(), 0) | events
        ready = _poll(wanted, None if self._frozen else self._pause(now))
        self._obey()
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)
        if not self._frozen:
            self._move(ready)

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(READ_BYTES)
        while not self._orders.empty():
            action, done = self._orders.get()
            action()
            done.set()

    def _pause(self, now: float) -> float | None:
        due = [at for flow in self._flows if (at := flow.next_at()) is not None and at > now]
        return min(due) - now if due else None

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # the client is gone again
            return
        self.accepted += 1
        family, kind, protocol, _, address = self._target
        target = socket.socket(family, kind, protocol)
        for end in (client, target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # one that fails shows when it is first read
            target.connect(address)
        self._flows += [Flow(client, target), Flow(target, client)]

    def _move(self, ready: frozenset[int]) -> None:
        now = time.monotonic()
        for flow in list(self._flows):
            try:
                if flow.source.fileno() in ready and not flow.is_full:
                    self._take(flow, now)
                self.moved += flow.send(now, self.bytes_per_s)
            except BlockingIOError:
                continue
            except OSError:
                self._reset(flow)
        self._forget_ended()

    def _take(self, flow: Flow, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            data = flow.source.recv(READ_BYTES)
            wrong = min(self._corrupt, len(data))
            self._corrupt -= wrong
            flow.add(bytes(byte ^ 0xFF for byte in data[:wrong]) + data[wrong:], now + self.delay_s)

    def _reset(self, broken: Flow) -> None:
        for end in (broken.source, broken.sink):
            _reset(end)
        self._flows = [flow for flow in self._flows if flow.source not in (broken.source, broken.sink)]

    def _forget_ended(self) -> None:
        open_sinks = {flow.sink for flow in self._flows if not flow.passed_end}
        ended = [flow for flow in self._flows if not {flow.source, flow.sink} & open_sinks]
        for flow in ended:
            flow.source.close()
        self._flows = [flow for flow in self._flows if flow not in ended]

    def _cut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for flow in self._flows:
            _reset(flow.source)
        self._flows = []

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.host, self.port)
            self._listener.setblocking(False)
            self._listener.listen(128)


class Flow:
    """One direction of one connection: what was read and waits for its time. An empty piece is the end."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.passed_end = False
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._ended = False
        self._free_at = 0.0

    @property
    def is_full(self) -> bool:
        return self._ended or self._size >= PENDING_BYTES

    def wants(self, now: float) -> Iterator[tuple[socket.socket, int]]:
        if not self.is_full:
            yield self.source, select.POLLIN
        at = self.next_at()
        if at is not None and at <= now:
            yield self.sink, select.POLLOUT

    def next_at(self) -> float | None:
        """When the next piece may go."""
        return max(self._pieces[0][0], self._free_at) if self._pieces else None

    def add(self, data: bytes, due: float) -> None:
        self._pieces.append((due, data))
        self._size += len(data)
        self._ended = not data

    def send(self, now: float, bytes_per_s: float | None) -> int:
        """Sends what is due and returns how many bytes; raises BlockingIOError where the sink takes no more."""
        moved = 0
        while (at := self.next_at()) is not None and at <= now:
            due, data = self._pieces[0]
            if not data:
                self.sink.shutdown(socket.SHUT_WR)
                self.passed_end = True
                self._pieces.popleft()
                break
            slice_bytes = len(data) if bytes_per_s is None else max(1, int(bytes_per_s / SLICES_PER_S))
            sent = self.sink.send(data[:slice_bytes])
            moved += sent
            self._size -= sent
            self._free_at = now + (sent / bytes_per_s if bytes_per_s else 0.0)
            self._pieces.popleft()
            if sent < len(data):
                self._pieces.appendleft((due, data[sent:]))
                break
        return moved


def _bound(host: str, port: int) -> socket.socket:
    end = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end.bind((host, port))
    return end


def _poll(wanted: dict[int, int], timeout_s: float | None) -> frozenset[int]:
    poller = select.poll()
    for fd, events in wanted.items():
        poller.register(fd, events)
    # Rounded up, or the last millisecond would be spent spinning.
    return frozenset(fd for fd, _ in poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1))


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    end.close()
