"""What became of KV blocks, numbered and kept for whoever asks; bounded, so that nobody has to."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from tllm_core.contracts.messages import KvEvent, KvEvents

MOST_PER_ANSWER = 4096


class KvEventLog:
    """Keeps the last `most` events. Readers say from which number on they want them, so that any number may read."""

    def __init__(self, most: int) -> None:
        self._kept: deque[KvEvent] = deque(maxlen=most)
        self._next = 0

    def stored(self, blocks: Sequence[int], tokens: int, hashes: Sequence[int], parent: int | None) -> None:
        """`hashes`: of the content of each block. `parent`: the hash before the first, None at the start of a prompt."""
        self._add(KvEvent("stored", tuple(blocks), tokens, tuple(hashes), parent))

    def removed(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        self._add(KvEvent("removed", tuple(blocks), 0, tuple(hashes)))

    def cleared(self) -> None:
        self._add(KvEvent("cleared"))

    def _add(self, event: KvEvent) -> None:
        self._kept.append(event)
        self._next += 1

    def since(self, number: int) -> KvEvents:
        """The events from `number` on; one beyond the end, as from another engine's time, is the end."""
        first = self._next - len(self._kept)
        begin = min(max(number, first), self._next)
        events = tuple(islice(self._kept, begin - first, begin - first + MOST_PER_ANSWER))
        end = begin + len(events)
        return KvEvents(events, end, max(0, begin - max(number, 0)), end < self._next)
