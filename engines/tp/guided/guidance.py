"""What the engine needs of guided decoding: who may begin, who waits for a grammar, and whose can't be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tllm_core.engines.tp.config import ModelConfig
from tllm_core.engines.tp.guided.compile import Grammar, load_vocabulary
from tllm_core.engines.tp.guided.grammars import Grammars
from tllm_core.engines.tp.requests import LiveRequest
from tllm_core.engines.tp.rules import Rules
from tllm_core.errors import ModelError, RequestError

SWITCHED_OFF = "the engine's setting `guided` is false"


class Guidance:
    """`supports`: "guided", or nothing where there can't be any. `end_ids`: the tokens that end a guided answer."""

    def __init__(self, config: ModelConfig, wake: Callable[[], None], *, wanted: bool) -> None:
        """Reads the vocabulary where it is `wanted` and can be used; see `load_vocabulary` for how long that takes."""
        self._grammars: Grammars | None = None
        self._reason = SWITCHED_OFF
        if wanted:
            try:
                vocabulary = load_vocabulary(config.model_dir, config.vocab_size, config.eos_token_ids)
                self._grammars = Grammars(vocabulary, wake)
            except ModelError as error:
                self._reason = str(error)
        self.end_ids = frozenset[int]() if self._grammars is None else self._grammars.end_ids
        self.supports = frozenset[str]() if self._grammars is None else frozenset({"guided"})

    def start(self, live: LiveRequest) -> bool:
        """False where the request has to wait for its grammar, which `compiled` will tell of.

        Raises RequestError where it asks for what this engine can't do.
        """
        guided = live.sampling.guided
        if guided is None:
            return True
        if self._grammars is None:
            raise RequestError(f"guided is not supported here: {self._reason}", field="guided")
        grammar = self._grammars.find(guided, live.request_id)
        if grammar is not None:
            _guide(live, grammar)
        return grammar is not None

    def compiled(self, requests: Mapping[int, LiveRequest]) -> Iterator[tuple[LiveRequest, str | None]]:
        """Those of `requests` whose grammar is there since the last call, or why it can't be used."""
        for request_ids, grammar in () if self._grammars is None else self._grammars.ready():
            for live in filter(None, map(requests.get, request_ids)):
                if isinstance(grammar, str):
                    yield live, f"the grammar can't be used: {grammar}"
                else:
                    _guide(live, grammar)
                    yield live, None

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()


def _guide(live: LiveRequest, grammar: Grammar) -> None:
    stops = grammar.stops(live.sequences[0].stop_ids)  # the same for all of them
    for sequence in live.sequences:
        sequence.rules = (sequence.rules or Rules()).guided_by(grammar.start(stops))
