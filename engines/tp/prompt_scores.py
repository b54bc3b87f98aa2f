"""Prompt logprobs of blocks that were computed before, so that requests which want them find prefixes too."""

from collections import OrderedDict
from collections.abc import Sequence

from tllm_core.contracts.messages import TokenLogprobs

MOST_ENTRIES = 1 << 20
"""Kept in all, about 100 bytes each."""


class PromptScores:
    """By the hash of a block, the logprobs of its tokens given all before them.

    They go with the block's content; where they are too many before that, those go first that were not used longest.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._kept: OrderedDict[bytes, tuple[int, tuple[TokenLogprobs, ...]]] = OrderedDict()
        self._most = most
        self._size = 0

    @property
    def size(self) -> int:
        """How many entries are kept."""
        return self._size

    def find(self, content: bytes, top: int) -> list[TokenLogprobs] | None:
        """Of each of the block's tokens its own entry and the `top` best; None where not so many are known."""
        known, scores = self._kept.get(content, (-1, ()))
        if known < top:
            return None
        self._kept.move_to_end(content)
        return [entries[: top + 1] for entries in scores] if known > top else list(scores)

    def keep(self, content: bytes, top: int, scores: Sequence[TokenLogprobs]) -> None:
        """What `find` gives later, unless more is known already."""
        known, old = self._kept.get(content, (-1, ()))
        if known >= top:
            return
        self._kept[content] = (top, tuple(scores))
        self._kept.move_to_end(content)
        self._size += sum(map(len, scores)) - sum(map(len, old))
        while self._size > self._most:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._size -= sum(map(len, dropped))

    def drop(self, content: bytes) -> None:
        """Forgets those of one block, if there are any."""
        _, scores = self._kept.pop(content, (0, ()))
        self._size -= sum(map(len, scores))

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0
