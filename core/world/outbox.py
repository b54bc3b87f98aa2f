"""What the worker has for one session: this step's rows, and what the session's lane had no room for."""

from collections.abc import Callable, Sequence

from tllm_core.contracts.messages import ControlReply, DownMessage
from tllm_core.errors import FrameTooLarge
from tllm_core.world.rows import Parked, Row, Rows, batch_of

Send = Callable[[int, DownMessage], bool]


class Outbox:
    """Sends one batch per flush; parks and merges while the lane is full, and tries again at each flush.

    `requests`: client id -> request id of what the session is owed. `stalled_since`: when the lane first refused what is
    parked now, None where nothing is.
    """

    def __init__(self, session: int, send: Send) -> None:
        self.session = session
        self.rows = Rows()
        self.requests: dict[int, int] = {}
        self.stalled_since: float | None = None
        self._send = send
        self._parked = Parked()
        self._replies: list[ControlReply] = []

    @property
    def parked_bytes(self) -> int:
        return self._parked.size + 256 * len(self._replies)

    def reply(self, reply: ControlReply) -> None:
        """Sends a reply at the next flush, after the rows that came before it."""
        self._replies.append(reply)

    def flush(self, now: float) -> Sequence[int]:
        """Offers all there is to the lane. Returns the client ids whose rows are too large to be ever sent."""
        too_large: Sequence[int] = ()
        if self.rows.client_ids:
            batch = self.rows.take()
            if self.stalled_since is not None or not self._offer(batch):
                self._parked.absorb(batch)
        if self._parked:
            too_large = self._offer_parked()
        if not self._parked:
            self._offer_replies()
        if not self._parked and not self._replies:
            self.stalled_since = None
        elif self.stalled_since is None:
            self.stalled_since = now
        return too_large

    def _offer(self, message: DownMessage) -> bool:
        try:
            return self._send(self.session, message)
        except FrameTooLarge:
            return False

    def _offer_parked(self) -> Sequence[int]:
        left, too_large = self._offer_rows(self._parked.rows())
        self._parked.keep(left)
        return too_large

    def _offer_rows(self, rows: list[Row]) -> tuple[list[Row], list[int]]:
        """Sends the rows in as few messages as their size allows: what is left, and client ids whose row fits in none."""
        try:
            return ([], []) if self._send(self.session, batch_of(rows)) else (rows, [])
        except FrameTooLarge:
            if len(rows) == 1:
                return [], [rows[0].client_id]
        middle = len(rows) // 2
        left, too_large = self._offer_rows(rows[:middle])
        if left:
            return left + rows[middle:], too_large
        left, more = self._offer_rows(rows[middle:])
        return left, too_large + more

    def _offer_replies(self) -> None:
        while self._replies:
            try:
                if not self._send(self.session, self._replies[0]):
                    return
                del self._replies[0]
            except FrameTooLarge as error:
                self._replies[0] = ControlReply(self._replies[0].call_id, error=f"the reply is too large: {error}")
