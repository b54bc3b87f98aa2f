"""The writing half of a port: takes frames without blocking, and writes each as exactly one entry, in order.

A batch is one transaction. Where its answer is lost it is sent again with the same ids, and an id that the server then has
already was written. What had not been sent when a connection was lost is dropped: the port says so by its state, and the
lane sends it again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from tllm_core.contracts.interfaces import Frame
from tllm_core.errors import FrameTooLarge, PortClosed, PortDown, PortFull
from tllm_core.transports.redis.connection import LOST, Command, Connection, in_words, refused_in_words
from tllm_core.transports.redis.entries import EntryIds, after
from tllm_core.transports.redis.outgoing import BATCH_ENTRIES, Entry, Stream, due, measured
from tllm_core.transports.redis.path import WRITE, Path
from tllm_core.transports.redis.settings import RedisSettings

PROOF_S = 0.2
"""How old the last answer may be before another is asked for."""
RETRY_S = 0.01
"""How soon a server without room, or a reader that is behind, is asked again."""
FULL_S = 0.5
"""How long a server may be without memory before that is more than back-pressure."""
TRIM_EVERY = 64
"""Entries that were read, at most, before they are removed; or PROOF_S."""
JOIN_S = 1.0
FAR = float("inf")


class Writer:
    """One thread and one connection. `put`, `trim` and `later` may be called from any thread.

    probe: a command that changes nothing, and that a server which refuses to write refuses: a PING it would answer.
    greet: after each connect, with the connection. beat: the same now and then. Both return in how many seconds `beat` is to
    be called. farewell: the same before the end.
    """

    def __init__(
        self,
        settings: RedisSettings,
        dial: Callable[[], Connection],
        path: Path,
        *,
        probe: Command,
        greet: Callable[[Connection], float],
        beat: Callable[[Connection], float],
        farewell: Callable[[Connection], None],
    ) -> None:
        self._settings, self._dial, self._path = settings, dial, path
        self._probe, self._greet, self._beat, self._farewell = probe, greet, beat, farewell
        self.ids = EntryIds()
        self._changed = threading.Condition()
        self._ready: dict[bytes, Stream] = {}
        self._stalled: dict[bytes, Stream] = {}
        self._streams: dict[bytes, Stream] = {}
        self._trims: dict[bytes, bytes] = {}
        self._untrimmed = 0
        self._later: list[Command] = []
        self._flight: list[Entry] = []
        self._fit = BATCH_ENTRIES
        self._full_since: float | None = None
        self._connection: Connection | None = None
        self._beat_at = self._again_at = self._poll_at = 0.0
        self._asked_at = self._doubted_at = 0.0
        self._closes_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="tllm-redis-write", daemon=True)

    def start(self, connection: Connection) -> None:
        """With an open connection. Raises one of LOST."""
        self._beat_at = time.monotonic() + self._greet(connection)
        self._connection = connection
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- from outside

    def put(self, stream: Stream, frame: Frame) -> None:
        """Takes a frame. Raises PortFull, PortDown, FrameTooLarge or PortClosed."""
        fields, size = measured(frame)
        settings = self._settings
        if size > settings.max_frame_bytes:
            raise FrameTooLarge(
                f"a frame of {size} bytes is over the limit of {settings.max_frame_bytes} (max_frame_bytes)"
            )
        with self._changed:
            if self._closes_at is not None:
                raise PortClosed("this redis port was closed")
            if not self._path.state.up:
                raise PortDown(self._path.state.reason)
            if len(stream.queue) >= settings.queue_frames or (
                stream.queue and stream.size + size > settings.queue_bytes
            ):
                raise PortFull("the server or the peer is too far behind (queue_frames, queue_bytes)")
            stream.add(fields, size)
            self._streams[stream.key] = stream
            if stream.key not in self._stalled:
                self._ready[stream.key] = stream
                self._changed.notify()

    def trim(self, key: bytes, last: bytes, count: int) -> None:
        """`count` more entries of the stream were read, up to `last`: they may go."""
        with self._changed:
            self._trims[key] = after(last)
            self._untrimmed += count
            if self._untrimmed >= self._trim_every:
                self._changed.notify()

    def later(self, *commands: Command) -> None:
        """Has commands run behind all that was written; dropped where the connection is lost."""
        with self._changed:
            self._later += commands
            self._changed.notify()

    def forget(self, stream: Stream) -> None:
        """Drops what waits for a stream."""
        with self._changed:
            self._streams.pop(stream.key, None)
            self._ready.pop(stream.key, None)
            self._stalled.pop(stream.key, None)
            stream.gone = True
            stream.clear()

    def prove(self, reason: str) -> None:
        """The other connection was lost: this one counts as lost too until the server has answered on it."""
        with self._changed:
            self._doubted_at = time.monotonic()
            self._asked_at = 0.0
            self._path.lost(WRITE, reason)
            self._changed.notify()

    def hurry(self) -> None:
        """Has `beat` called at once."""
        with self._changed:
            self._beat_at = 0.0
            self._changed.notify()

    def close(self, linger_s: float) -> None:
        """Ends it once all is written and `farewell` was said, or after `linger_s` seconds."""
        with self._changed:
            self._closes_at = time.monotonic() + linger_s
            self._changed.notify()
        if self._thread.ident is None:
            return
        self._thread.join(linger_s + RETRY_S)
        connection = self._connection
        if connection is not None and self._thread.is_alive():
            connection.shut()
        self._thread.join(JOIN_S)  # one that is connecting just now ends by itself

    def disown(self) -> None:
        """In a forked child: neither the lock nor the connection is its own."""
        self._changed = threading.Condition()
        self._closes_at = time.monotonic()
        if self._connection is not None:
            self._connection.close()

    # ------------------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        try:
            while not self._is_over():
                try:
                    self._round()
                except LOST as error:
                    self._lose(refused_in_words(error) if isinstance(error, ResponseError) else in_words(error))
        finally:
            if self._connection is not None:
                self._connection.close()

    def _is_over(self) -> bool:
        closes_at = self._closes_at
        if closes_at is None:
            return False
        if self._connection is None or time.monotonic() >= closes_at:
            return True
        if self._flight or self._ready or self._stalled or self._later:
            return False
        with contextlib.suppress(*LOST):  # what is left goes when its time to live is over
            self._farewell(self._connection)
            with self._changed:
                left, self._later = self._later, []
            if left:
                self._connection.run(left)
        return True

    def _round(self) -> None:
        if self._connection is None:
            self._connect()
        connection = self._connection
        if connection is None:
            return
        if time.monotonic() >= self._beat_at:
            self._beat_at = FAR
            wait_s = self._beat(connection)
            self._beat_at = min(self._beat_at, time.monotonic() + wait_s)
        self._wait()
        self._write(connection)

    def _connect(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closes_at is not None, self._pause_s())
            if self._closes_at is not None:
                return
        connection = self._dial()
        try:
            self._beat_at = time.monotonic() + self._greet(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._again_at = 0.0
        self._proven(time.monotonic())
        self._path.back(WRITE)

    def _pause_s(self) -> float:
        return max(0.0, self._again_at - time.monotonic())

    def _lose(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        for entry in self._flight:
            entry.tried = True
        self._path.lost(WRITE, reason)
        self._again_at = time.monotonic() + self._settings.reconnect_s
        with self._changed:
            for stream in self._streams.values():
                stream.clear()
                stream.made, stream.length = False, 0
            self._ready.clear()
            self._stalled.clear()
            self._later.clear()

    def _wait(self) -> None:
        """Until there is something to do. Entries that the server or a reader had no room for wait their time."""
        with self._changed:
            while self._closes_at is None:
                now = time.monotonic()
                held = now < self._again_at
                if not held and (self._flight or self._ready):
                    return
                if self._later or self._untrimmed >= self._trim_every:
                    return
                until = min(self._beat_at, self._asked_at + PROOF_S)
                if self._flight or self._ready:
                    until = min(until, self._again_at)
                if self._stalled:
                    until = min(until, self._poll_at)
                if until <= now:
                    return
                self._changed.wait(until - now)
            self._changed.wait(RETRY_S if self._stalled else self._pause_s())

    @property
    def _trim_every(self) -> int:
        return min(TRIM_EVERY, max(1, self._settings.queue_frames // 4))

    def _write(self, connection: Connection) -> None:
        """One exchange with the server: the next entries, or whether it would take any; what was read; how far readers are."""
        asked, extra = self._take()
        entries = self._flight[: self._fit]
        commands: list[Command] = [("MULTI",), *(entry.command() for entry in entries), ("EXEC",)]
        if not entries:
            commands = [self._probe]
        count = len(commands)
        commands += [("PEXPIRE", stream.key, self._settings.ttl_ms) for stream in asked if not stream.made]
        first_length = len(commands)
        commands += [("XLEN", stream.key) for stream in asked]
        sent_at = time.monotonic()
        replies = connection.run([*commands, *extra])
        is_written = self._is_accepted(replies[:count], sent_at)
        for stream, length in zip(asked, replies[first_length:], strict=False):
            if not isinstance(length, int):
                raise length
            stream.length = length
        if entries and is_written:
            self._settle(connection, entries, replies[count - 1])
        elif entries:
            self._fit = max(1, len(entries) // 2)  # the transaction itself takes memory too
        self._requeue(asked)

    def _take(self) -> tuple[list[Stream], list[Command]]:
        """Which streams it is about, and what else is to be done; moves the next entries into flight."""
        with self._changed:
            asked = list(self._ready.values())
            if self._stalled and (self._closes_at is not None or time.monotonic() >= self._poll_at):
                asked += self._stalled.values()
                self._stalled.clear()
            self._flight = [entry for entry in self._flight if not entry.stream.gone]
            if not self._flight:
                batch = due(asked, self._settings.queue_frames)
                self._flight = [Entry(stream, self.ids.next(), fields) for stream, fields in batch]
            self._ready.clear()
            in_flight = {entry.stream.key: entry.stream for entry in self._flight}
            extra: list[Command] = [("XTRIM", key, "MINID", first) for key, first in self._trims.items()]
            self._trims.clear()
            self._untrimmed = 0
            extra += self._later
            self._later = []
        return list({**in_flight, **{stream.key: stream for stream in asked}}.values()), extra

    def _requeue(self, asked: Sequence[Stream]) -> None:
        """Streams that still have entries come again: at once, or in a while where their readers are behind."""
        again_at = time.monotonic() + RETRY_S
        with self._changed:
            for stream in asked:
                if stream.queue and not stream.gone:
                    has_room = stream.length < self._settings.queue_frames
                    (self._ready if has_room else self._stalled)[stream.key] = stream
                    self._poll_at = again_at
            if self._flight:
                self._again_at = again_at

    def _is_accepted(self, replies: Sequence[Any], sent_at: float) -> bool:
        """Whether the server writes. One that has no memory may have some soon, and the same is sent again: False, and
        after FULL_S the path counts as down. Raises what else it refuses with."""
        self._asked_at = sent_at
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if not errors:
            self._full_since = None
            self._proven(sent_at)
            if sent_at >= self._doubted_at:
                self._path.back(WRITE)
            return True
        if not any(map(_has_no_memory, errors)):
            raise errors[0]
        if self._full_since is None:
            self._full_since = sent_at
        elif sent_at - self._full_since > FULL_S:
            self._path.lost(WRITE, refused_in_words(errors[0]))
        return False

    def _proven(self, sent_at: float) -> None:
        self._asked_at = sent_at
        self._path.proven(WRITE, sent_at)

    def _settle(self, connection: Connection, entries: list[Entry], results: list[Any]) -> None:
        """What became of the entries of one transaction; what was not written stays in flight."""
        self._fit = min(BATCH_ENTRIES, self._fit * 2)
        left = [
            entry
            for entry, result in zip(entries, results, strict=True)
            if not self._is_written(connection, entry, result)
        ]
        self._flight = left + self._flight[len(entries) :]

    def _is_written(self, connection: Connection, entry: Entry, result: Any) -> bool:
        stream = entry.stream
        if isinstance(result, bytes):
            stream.made = True
            return True
        if result is None:
            if stream.made:
                stream.made = False
                self._path.disturbed()
            return False
        if isinstance(result, ResponseError) and "equal or smaller" in str(result):
            if entry.tried:
                return True
            self._skip(connection, entry)
            return False
        raise result

    def _skip(self, connection: Connection, entry: Entry) -> None:
        """Somebody else wrote to this stream, with higher ids: go on above them."""
        facts = connection.call("XINFO", "STREAM", entry.stream.key)
        self.ids.skip(dict(zip(facts[::2], facts[1::2], strict=False))[b"last-generated-id"])
        entry.id = self.ids.next()
        self._path.disturbed()


def _has_no_memory(reply: Any) -> bool:
    """A command was refused for that, or the whole transaction was, for the same reason in other words."""
    return isinstance(reply, OutOfMemoryError) or (isinstance(reply, ResponseError) and "OOM command" in str(reply))
