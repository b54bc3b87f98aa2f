"""Grammars are compiled by a thread of their own, so that no step waits for one; those of late are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from tllm_core.contracts.messages import GuidedDecoding
from tllm_core.engines.tp.guided.compile import Grammar, compile_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KEPT = 32


class Compiled(NamedTuple):
    """Of the requests that asked for it: a grammar, or why there can't be one."""

    request_ids: list[int]
    grammar: Grammar | str


class Grammars:
    """All methods are called by the engine's thread. `wake` is called by another one whenever `ready` has news."""

    def __init__(self, vocabulary: LLTokenizer, wake: Callable[[], None]) -> None:
        self._vocabulary, self._wake = vocabulary, wake
        self.end_ids = frozenset(vocabulary.eos_tokens)
        self._kept: OrderedDict[GuidedDecoding, Grammar] = OrderedDict()
        self._asked: dict[GuidedDecoding, list[int]] = {}
        self._jobs: SimpleQueue[GuidedDecoding | None] = SimpleQueue()
        self._done: deque[tuple[GuidedDecoding, Grammar | str]] = deque()
        self._thread: threading.Thread | None = None

    def find(self, guided: GuidedDecoding, request_id: int) -> Grammar | None:
        """At once where it is known, else None, and `ready` will name `request_id`."""
        if (grammar := self._kept.get(guided)) is not None:
            self._kept.move_to_end(guided)
            return grammar
        if guided in self._asked:
            self._asked[guided].append(request_id)
        else:
            self._asked[guided] = [request_id]
            self._jobs.put(guided)
            self._start()
        return None

    def ready(self) -> list[Compiled]:
        """What has been compiled since the last call."""
        news = []
        while self._done:
            guided, grammar = self._done.popleft()
            news.append(Compiled(self._asked.pop(guided), grammar))
            if not isinstance(grammar, str):
                self._kept[guided] = grammar
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return news

    def close(self) -> None:
        """Does not wait for what is being compiled: the thread ends after it, and keeps no interpreter from its exit."""
        self._jobs.put(None)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tllm-grammars", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (guided := self._jobs.get()) is not None:
            grammar: Grammar | str
            try:
                grammar = compile_grammar(self._vocabulary, guided)
            except Exception as error:  # whatever a grammar does to its compiler is that request's own error
                grammar = str(error) or type(error).__name__
            self._done.append((guided, grammar))
            self._wake()
