"""What both ends of a lane over NATS share: a thread with an event loop, and connection after connection on it.

Callers' threads only touch the queue, the inbox and the state, under one lock; everything else belongs to the loop. A frame
for the other end waits in the queue until one coroutine publishes it, so that the order stays. Nothing is kept while the
port is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from tllm_core.contracts.interfaces import Frame, PortState
from tllm_core.contracts.packing import measure, pack, table_bytes, unpack
from tllm_core.errors import FrameTooLarge, PortClosed, PortDown, PortFull, TransportError
from tllm_core.transports.nats.client import DEAF, Connection, Lost, end, within
from tllm_core.transports.nats.inbox import Inbox
from tllm_core.transports.nats.settings import NatsSettings, shown_urls
from tllm_core.transports.nats.subjects import Subjects

log = logging.getLogger("tllm_core.transports.nats")

HEADER_ROOM = 4096
"""Bytes below the server's `max_payload`: beyond that a server ends the connection for good."""
LEAST_PAYLOAD = HEADER_ROOM + 4096
"""Room for a Welcome, with what an engine says of itself."""
DEFAULT_MAX_FRAME = (1 << 20) - HEADER_ROOM
YIELD_EVERY = 64
"""Publishes in a row before the loop gets to write and read."""

SHARED = 0.8
"""Of the time that opening a port may take, what the attempts at several servers share: each gets its turn, and is told of."""

_open_ports: weakref.WeakSet[ConnectedPort] = weakref.WeakSet()
_inherited: list[ConnectedPort] = []


def _disown_all() -> None:
    # Kept, because the destructors of a loop and its sockets would reach into the parent's event queue.
    _inherited.extend(_open_ports)
    for port in _inherited:
        port.disown()


os.register_at_fork(after_in_child=_disown_all)


class ConnectedPort:
    """The half that both ends share; mixed into the ports. `open` starts it."""

    def __init__(self, settings: NatsSettings, urls: Sequence[str], subjects: Subjects) -> None:
        self.max_frame: int | None = min(DEFAULT_MAX_FRAME, settings.max_frame_bytes)
        self._settings, self._urls, self._subjects = settings, urls, subjects
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, bytes]] = deque()
        self._queued_bytes = 0
        self._handed = 0
        self._inbox = Inbox(settings.receive_queue_bytes)
        self._state = PortState(False, f"{shown_urls(list(urls))} did not answer yet", time.monotonic())
        self._path_ok_at = time.monotonic()
        self._connection: Connection | None = None
        self._opened = threading.Event()
        self._refused = ""
        self._causes: dict[str, Lost] = {}
        self._attempt_s = settings.connect_timeout_s * (1 if len(urls) == 1 else SHARED / len(urls))
        self._closed = False
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._pending = asyncio.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tllm-nats", daemon=True)

    def open(self) -> None:
        """Waits for the server. Raises TransportError where it can't be reached or refuses, in `connect_timeout_s`."""
        _open_ports.add(self)
        self._thread.start()
        try:
            if not self._opened.wait(self._settings.connect_timeout_s):
                raise TransportError(f"{self._state.reason}; is a nats-server there? Set transport.nats.url")
            if self._refused:
                raise TransportError(self._refused)
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> PortState:
        return self._state

    def path_ok_at(self) -> float:
        return self._path_ok_at

    def wake(self) -> None:
        self._inbox.wake()

    def receive(self, timeout: float | None) -> list[Frame]:
        blocks, dropped = self._inbox.take(timeout)
        if dropped:
            log.debug("nats: received more than was read (receive_queue_bytes); what was dropped will be sent again")
            with self._lock:
                if self._state.up:
                    self._state = PortState(True, since=time.monotonic())
        return [unpack(block) for block in blocks]

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._state = PortState(False, "closed", time.monotonic(), closed=True)
            self._loop.call_soon_threadsafe(self._closing.set)
        self._inbox.close()
        self._thread.join()
        _open_ports.discard(self)

    def disown(self) -> None:
        """In a forked child: the port is the parent's, and this copy of it only says so."""
        self._lock, self._inbox = threading.Lock(), Inbox(0)
        self._closed, self._state = True, PortState(False, "closed", time.monotonic(), closed=True)
        self._inbox.close()
        if self._loop.is_closed():
            return
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # The numbers stay taken, and the connection ends with the parent.
        for key in self._selector.get_map().values():
            os.dup2(nothing, key.fd, inheritable=False)
        os.close(nothing)

    def _send(self, subject: str, frame: Frame) -> None:
        sizes = measure(frame)
        size = sum(sizes)
        if self.max_frame is not None and max(size, size + table_bytes(len(sizes)) - HEADER_ROOM) > self.max_frame:
            raise FrameTooLarge(
                f"a frame of {size} bytes is over the limit of {self.max_frame} (max_payload of the server)"
            )
        block = pack(frame, sizes)
        with self._lock:
            self._check_up()
            if self._queue and not self._has_room(len(block)):
                raise PortFull("the nats server is too far behind (send_queue_frames, send_queue_bytes)")
            self._queue.append((subject, block))
            self._queued_bytes += len(block)
            if len(self._queue) == 1:
                self._loop.call_soon_threadsafe(self._pending.set)

    def _has_room(self, size: int) -> bool:
        settings = self._settings
        return len(self._queue) < settings.send_queue_frames and self._queued_bytes + size <= settings.send_queue_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise PortClosed("this nats port was closed")

    def _check_up(self) -> None:
        self._check_open()
        if not self._state.up:
            raise PortDown(self._state.reason)

    # --------------------------------------------------------------------------- on the loop, connection after connection

    async def _enter(self, connection: Connection) -> None:
        """Subscribes, and returns once frames can be sent. Raises Lost, or what nats-py raises."""
        raise NotImplementedError

    async def _leave(self, connection: Connection) -> None:
        """The last that is published."""

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda _, context: log.debug("nats: %s", context.get("message")))
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._connect_for_ever())
        await self._closing.wait()
        await self._linger()
        await end({serving})
        await end({task for task in asyncio.all_tasks() if task is not asyncio.current_task()})

    async def _connect_for_ever(self) -> None:
        pause = self._settings.reconnect_s
        for url in itertools.cycle(self._urls):
            connection = Connection(self._settings, url, self._subjects.prefix, self._inbox.dropped, self._attempt_s)
            self._connection = connection
            try:
                await self._use(connection)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # nats-py cancels what waits for it when it loses its connection; nobody asked this task to end.
                self._went_down(url, Lost(f"{connection.url} was lost in the middle of something"))
            except Exception as error:  # whatever a client library comes up with, the port goes on
                lost = connection.as_lost(error)
                if not isinstance(error, (Lost, *DEAF)) and str(self._causes.get(url)) != str(lost):
                    log.exception("nats: not expected of %s", connection.url)
                if self._state.up:
                    pause = self._settings.reconnect_s
                self._went_down(url, lost)
            finally:
                await connection.close()
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._settings.reconnect_max_s)

    async def _use(self, connection: Connection) -> None:
        """Never returns: raises Lost once the connection is."""
        await connection.open()
        if connection.client.max_payload < LEAST_PAYLOAD:
            raise Lost(
                f"the nats server {connection.url} takes messages of {connection.client.max_payload} bytes at most "
                f"(its max_payload); tllm needs {LEAST_PAYLOAD}",
                hopeless=True,
            )
        tasks = [asyncio.create_task(self._work(connection)), asyncio.create_task(self._probe(connection))]
        waited: list[asyncio.Future[Any]] = [*tasks, connection.lost]
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if connection.lost.done():
            raise connection.lost.result()
        for task in tasks:
            if task not in done:
                continue
            if task.cancelled():
                raise Lost(f"{connection.url} was lost in the middle of something")
            if (error := task.exception()) is not None:
                raise error

    async def _work(self, connection: Connection) -> None:
        await self._enter(connection)
        self._came_up(connection)
        while True:
            await self._pending.wait()
            self._pending.clear()
            for number in itertools.count(1):
                if not await self._publish_next(connection):
                    break
                if number % YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    async def _publish_next(self, connection: Connection) -> bool:
        """One frame stays in the queue until it was handed over, so that the queue's bounds hold for it as well."""
        if not self._queue or connection.lost.done():
            return False
        subject, block = self._queue[0]
        await connection.client.publish(subject, block)
        with self._lock:
            if self._queue:
                self._queue.popleft()
                self._queued_bytes -= len(block)
        self._handed += 1
        return True

    async def _probe(self, connection: Connection) -> None:
        """Notes when an echo was asked for that came; a connection that shows no sign of life at all is given up."""
        stale_s = self._settings.stale_after_s
        while True:
            asked_at, seen = time.monotonic(), self._signs_of_life(connection)
            asking = asyncio.create_task(connection.echo())
            while not (await asyncio.wait([asking], timeout=stale_s))[0]:
                before, seen = seen, self._signs_of_life(connection)
                if seen == before:
                    raise Lost(f"{connection.url} has shown no sign of life for {stale_s:g} s")
            if asking.cancelled():  # nats-py cancels what waits for an answer when it loses its connection
                raise Lost(f"{connection.url} was lost while it was asked")
            asking.result()
            self._path_ok_at = asked_at
            await asyncio.sleep(max(0.0, asked_at + self._settings.probe_s - time.monotonic()))

    def _signs_of_life(self, connection: Connection) -> tuple[int, int]:
        return connection.client.stats["in_msgs"], self._handed

    async def _linger(self) -> None:
        """Publishes what was taken, and sees that the server has it: a close right after could still lose it."""
        connection = self._connection
        if connection is None or connection.lost.done() or not connection.client.is_connected:
            return
        with contextlib.suppress(*DEAF, asyncio.CancelledError):
            await within(self._settings.linger_s, self._finish(connection))

    async def _finish(self, connection: Connection) -> None:
        while self._queue:
            await connection.echo()
        await self._leave(connection)
        await connection.echo()

    # --------------------------------------------------------------------------------------------------------- state

    def _came_up(self, connection: Connection) -> None:
        limit = connection.client.max_payload - HEADER_ROOM
        self.max_frame = max(1, min(limit, self._settings.max_frame_bytes))
        with self._lock:
            if not self._closed:
                self._state = PortState(True, since=time.monotonic())
        if self._opened.is_set():
            log.info("nats: connected to %s", connection.url)
            self._inbox.wake()
        self._opened.set()

    def _went_down(self, url: str, lost: Lost) -> None:
        """Each server that was tried has its own cause; a later one may serve where an earlier one refuses."""
        if self._state.up:
            self._causes.clear()
        self._causes[url] = lost
        reason = "; ".join(dict.fromkeys(map(str, self._causes.values())))
        before = self._say_down(reason)
        is_hopeless = all(url in self._causes and self._causes[url].hopeless for url in self._urls)
        if is_hopeless and not self._opened.is_set():
            self._refused = reason
            self._opened.set()
        elif before.up:
            log.warning("nats: %s; reconnecting", lost)

    def _say_down(self, reason: str) -> PortState:
        """Returns the state before. One outage has one beginning, whatever becomes of its reason."""
        with self._lock:
            before = self._state
            self._queue.clear()
            self._queued_bytes = 0
            if not self._closed and (before.up or before.reason != reason):
                self._state = PortState(False, reason, time.monotonic() if before.up else before.since)
        if self._state is not before and self._opened.is_set():
            self._inbox.wake()
        return before
