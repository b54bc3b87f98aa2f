"""One lane pair of a session: sequence, acknowledgement, window, backlog, chunks and resend. Sans-IO; times are passed in.

A frame is accepted when it gets its sequence number; from then on it is the lane's business until the peer acknowledges it.
What is acknowledged was delivered: the acknowledgement trails what was taken until `delivered` is called. Frames are sent
again only after evidence of loss, or a long silence, where the port is reliable, and with exponential back-off elsewhere.
"""

from collections import Counter
from typing import Any

from msgspec import Struct

from tllm_core.errors import Overloaded
from tllm_core.wire.chunks import chunks
from tllm_core.wire.settings import WireSettings

PORT_RETRY_MAX_S = 0.1


class Outgoing(Struct, frozen=True):
    """An accepted frame; its payload is an immutable snapshot. `size` in bytes; `flags`: MORE and CUT of a chunk."""

    sequence: int
    kind: int
    payload: tuple[Any, ...]
    size: int
    flags: int = 0


class Sender:
    """The outgoing half. Frames up to `acked` are done, up to `sent` the port had them once, up to `last` they are accepted.

    `cursor` is the next frame for the port: it goes back to resend. Between `acked` and `cursor` lies what is in flight.
    """

    def __init__(
        self, settings: WireSettings, counters: Counter[str], *, reliable: bool, room: int | None = None
    ) -> None:
        self.settings = settings
        self.counters = counters
        self.reliable = reliable
        quarter = max(1, settings.window_bytes // 4)
        self.chunk_bytes = quarter if room is None else max(1, min(room, quarter))
        self.acked = self.sent = self.last = 0
        self.cursor = 1
        self._frames: dict[int, Outgoing] = {}
        self._flight_bytes = self._backlog_bytes = 0
        self.retry_at, self._retry_s = 0.0, settings.port_retry_s
        self._resend_at: float | None = None
        self._probed = False
        self._recover_until = 0
        self._resend_s = self._patience_s()
        self._last_gap = (-1, 0.0)

    @property
    def is_idle(self) -> bool:
        """Nothing is unacknowledged."""
        return self.acked == self.last

    def offer(self, kind: int, payload: tuple[Any, ...], size: int, urgent: bool = False) -> int:
        """Accepts a message, in chunks where it is larger than `chunk_bytes`: its last frame's sequence number.

        Raises Overloaded where the backlog is full, unless `urgent`; nothing was taken then.
        """
        backlog = self.last - self.sent
        if backlog and not urgent:
            settings = self.settings
            if backlog >= settings.backlog_frames or self._backlog_bytes + size > settings.backlog_bytes:
                raise Overloaded(f"{backlog} messages ({self._backlog_bytes} bytes) wait to be sent; try again later")
        if size <= self.chunk_bytes:
            return self._accept(kind, payload, size)
        for piece, flags in chunks(payload, self.chunk_bytes):
            self._accept(kind, (piece,), piece.nbytes, flags)
        return self.last

    def _accept(self, kind: int, payload: tuple[Any, ...], size: int, flags: int = 0) -> int:
        self.last = sequence = self.last + 1
        self._frames[sequence] = Outgoing(sequence, kind, payload, size, flags)
        self._backlog_bytes += size
        return sequence

    def due(self, now: float) -> Outgoing | None:
        """The frame to hand to the port now. Answer with `handed` or `blocked`, and ask again."""
        if now < self.retry_at:
            return None
        if self._resend_at is not None and now >= self._resend_at:
            return self._frames[self.acked + 1]
        return self._frames[self.cursor] if self.cursor <= self.last and self._has_window() else None

    def handed(self, frame: Outgoing, now: float) -> None:
        """The port took `frame`, which `due` had returned."""
        self._retry_s = self.settings.port_retry_s
        if frame.sequence < self.cursor:
            self.counters["resent"] += 1
            self._probed = self._is_doubtful()
            self._resend_s = min(self._resend_s * 2, max(self.settings.resend_max_s, 4 * self._patience_s()))
            self._resend_at = now + self._resend_s
            return
        self.cursor += 1
        self._flight_bytes += frame.size
        if frame.sequence > self.sent:
            self.sent = frame.sequence
            self._backlog_bytes -= frame.size
        else:
            self.counters["resent"] += 1
        if self._resend_at is None:
            self._resend_at = now + self._resend_s

    def blocked(self, now: float) -> None:
        """The port was full or down; it is tried again a little later."""
        self.retry_at = now + self._retry_s
        self._retry_s = min(self._retry_s * 2, PORT_RETRY_MAX_S)

    def acknowledge(self, ack: int, gap: bool, now: float) -> None:
        """The peer has delivered all up to `ack`; `gap`: and misses what came next."""
        if ack > self.sent:
            self.counters["bad_ack"] += 1
        elif ack > self.acked:
            self._advance(ack, now)
        if gap and ack == self.acked and ack < self.sent:
            self._fill_gap(ack, now)

    def path_changed(self) -> None:
        """The port reconnected: what was in flight may be lost."""
        self.retry_at = 0.0
        self._go_back()

    def next_at(self) -> float | None:
        """When `due` has to be asked again, if nothing else happens before."""
        if self.cursor <= self.last and self._has_window():
            return self.retry_at
        return self._resend_at

    def _has_window(self) -> bool:
        """Whether the frame at the cursor, if there is one, may be in flight too."""
        flight = self.cursor - self.acked - 1
        if flight == 0:
            return True
        settings = self.settings
        size = self._frames[self.cursor].size
        return flight < settings.window_frames and self._flight_bytes + size <= settings.window_bytes

    def _is_doubtful(self) -> bool:
        """Whether a short silence of the peer is taken for loss."""
        return not self.reliable or self.acked < self._recover_until

    def _patience_s(self) -> float:
        return self.settings.resend_after_s if self._is_doubtful() else self.settings.probe_after_s

    def _advance(self, ack: int, now: float) -> None:
        for sequence in range(self.acked + 1, ack + 1):
            size = self._frames.pop(sequence).size
            if sequence < self.cursor:
                self._flight_bytes -= size
        self.acked = ack
        if self.cursor <= ack:
            self.cursor = ack + 1
        self._resend_s = self._patience_s()
        self._resend_at = None if self.cursor == ack + 1 else now + self._resend_s
        if self._probed:
            # The probe was missing, so what was sent after it most likely is as well.
            self._go_back()

    def _fill_gap(self, ack: int, now: float) -> None:
        last_ack, at = self._last_gap
        if ack == last_ack and now < at + self.settings.resend_after_s / 2:
            return
        self._last_gap = (ack, now)
        self._go_back()

    def _go_back(self) -> None:
        self.cursor = self.acked + 1
        self._flight_bytes = 0
        self._resend_at, self._probed = None, False
        self._recover_until = self.sent
        self._resend_s = self._patience_s()


class Receiver:
    """The incoming half. Frames up to `taken` were taken in order, up to `ack` their content was delivered.

    `gap`: a later frame came while the next one is missing. `urgent`: acknowledge at once.
    """

    def __init__(self, settings: WireSettings, counters: Counter[str]) -> None:
        self.settings = settings
        self.counters = counters
        # A sender whose window is smaller than that would wait for the delay each time.
        self._ack_every_frames = max(1, min(settings.ack_every_frames, settings.window_frames // 2))
        self.taken = self.ack = 0
        self.gap = False
        self._told = 0
        self._ack_at: float | None = None
        self.urgent = False
        self._gap_told_at = -1e9

    def take(self, sequence: int, now: float) -> bool:
        """Whether this is the next frame; all others are dropped and counted."""
        if sequence == self.taken + 1:
            self.taken = sequence
            self.gap = False
            if self._ack_at is None:
                self._ack_at = now + self.settings.ack_delay_s
            return True
        if sequence <= self.taken:
            # The peer doesn't know that it arrived.
            self.counters["duplicate"] += 1
            self.urgent = True
        else:
            self.counters["out_of_order"] += 1
            self.gap = True
            if now >= self._gap_told_at + self.settings.resend_after_s / 2:
                self._gap_told_at = now
                self.urgent = True
        return False

    def delivered(self) -> None:
        """All that was taken reached whom it was for, and may be acknowledged."""
        self.ack = self.taken

    def told(self, now: float) -> None:
        """A frame with the current acknowledgement and gap bit was handed to the port."""
        self._told = self.ack
        self.urgent = False
        self._ack_at = None if self.taken == self.ack else now + self.settings.ack_delay_s

    def is_ack_due(self, now: float) -> bool:
        """Whether a frame should be sent for the acknowledgement alone."""
        owed = self.ack - self._told
        if owed and (owed >= self._ack_every_frames or (self._ack_at is not None and now >= self._ack_at)):
            return True
        return self.urgent

    def path_changed(self) -> None:
        """The port reconnected: the last acknowledgement may be lost, and so may frames whose sender can't know of it."""
        self.gap = self.urgent = True

    def next_at(self) -> float | None:
        """When `is_ack_due` has to be asked again."""
        if self.urgent:
            return 0.0
        return self._ack_at if self.ack > self._told else None


class Lane:
    """Both halves: each frame of one acknowledges the other."""

    sender_type: type[Sender] = Sender
    receiver_type: type[Receiver] = Receiver

    def __init__(
        self, settings: WireSettings, counters: Counter[str], *, reliable: bool, room: int | None = None
    ) -> None:
        self.sender = self.sender_type(settings, counters, reliable=reliable, room=room)
        self.receiver = self.receiver_type(settings, counters)

    @property
    def is_quiet(self) -> bool:
        """Nothing to send, to resend or to acknowledge."""
        sender, receiver = self.sender, self.receiver
        return sender.acked == sender.last and receiver.ack == receiver.taken and receiver.next_at() is None

    def next_at(self) -> float | None:
        """When something is due, if nothing arrives before; long past = now."""
        sender = self.sender
        at, ack_at = None if sender.acked == sender.last else sender.next_at(), self.receiver.next_at()
        if at is None or (ack_at is not None and ack_at < at):
            at = ack_at
        return None if at is None else max(at, sender.retry_at)

    def path_changed(self) -> None:
        """The port reconnected: whatever was on its way, in either direction, may be lost."""
        self.sender.path_changed()
        self.receiver.path_changed()
