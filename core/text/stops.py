"""Stop strings in a stream of text, wherever they fall over its chunks.

A match is the one that completes first; of those that complete at the same character the longest. That depends on the text
alone, not on how it was cut into tokens or steps. Text that may still become a stop string is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct


class Match(Struct, frozen=True):
    """`stop` was found at [start, end) of the sequence's text, in characters."""

    stop: str
    start: int
    end: int


class StopStrings:
    """An Aho-Corasick automaton over the stop strings of a request: one look-up per character, however many there are.

    States are the prefixes of the stop strings, 0 the empty one. `hold[state]`: how many characters at the end of the text
    may still be the beginning of a stop string. `found[state]`: the longest stop string that the text ends with. `firsts`:
    the characters that stop strings begin with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.found: list[str | None] = [None]
        self.hold: list[int] = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self.firsts = frozenset(self._next[0])

    def _add(self, stop: str) -> None:
        state = 0
        for length, character in enumerate(stop, 1):
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.found.append(None)
                self.hold.append(length)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first, so that shorter suffixes are final when they are needed."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            self.found[state] = self.found[state] or self.found[fail]
            if not self._next[state]:
                self.hold[state] = self.hold[fail]
            for character, child in self._next[state].items():
                self._fail[child] = self.step(fail, character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        following = self._next[state].get(character)
        while following is None and state:
            state = self._fail[state]
            following = self._next[state].get(character)
        return following or 0


class StopScanner:
    """Looks for stop strings in one sequence's text."""

    __slots__ = ("_state", "_stops", "length")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self.length = 0

    def feed(self, text: str, *, armed: bool = True) -> Match | None:
        """Takes the next `text`; returns the match that completes in it, if `armed`. Nothing is fed after a match."""
        stops, state = self._stops, self._state
        if not state and stops.firsts.isdisjoint(text):  # the common case, without a loop in Python
            self.length += len(text)
            return None
        for offset, character in enumerate(text, 1):
            state = stops.step(state, character)
            if armed and (stop := stops.found[state]) is not None:
                end = self.length + offset
                return Match(stop, end - len(stop), end)
        self._state = state
        self.length += len(text)
        return None

    @property
    def held(self) -> int:
        """How many characters at the end may still be the beginning of a stop string."""
        return self._stops.hold[self._state]
