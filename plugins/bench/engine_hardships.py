"""Requests that take the engine more work than plain ones, or can't be served, and what that costs whoever runs beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from tllm_core.plugins.bench.engine_streams import ATTEMPTS, Stream, World, at_once, typical_gap_s

PROMPT_TOKENS = 16
_TOO_LARGE = "(.*[a-m].{16})+"
_NEW = itertools.count()

Sampling = Mapping[str, Any]


class Hardship(Struct, frozen=True):
    """A kind of request. sampling: of the next one, by the size of the vocabulary."""

    name: str
    sampling: Callable[[int], Sampling]
    guided: bool = False


def _schema(name: str) -> Sampling:
    """Of answers that never end: how many tokens there are is the benchmark's choice."""
    item = {
        "type": "object",
        "properties": {
            name: {"type": "string"},
            "kind": {"enum": ["one", "two", "three"]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": [name, "kind", "count", "tags"],
        "additionalProperties": False,
    }
    return {"guided": {"json": {"type": "array", "items": item, "minItems": 10_000}}}


PLAIN = Hardship("another plain one (noise)", lambda vocab: {})
HARDSHIPS = (
    PLAIN,
    Hardship("20 logprobs of each token", lambda vocab: {"logprobs": min(20, vocab)}),
    Hardship("a bias for every token id", lambda vocab: {"logit_bias": [(i, i % 7 / 10) for i in range(vocab)]}),
    Hardship("JSON schema, known", lambda vocab: _schema("name"), guided=True),
    Hardship("JSON schema, new", lambda vocab: _schema(f"name{next(_NEW)}"), guided=True),
    Hardship("expression, slow", lambda vocab: {"guided": {"regex": "(.*(a|b).{200}){30}"}}, guided=True),
    Hardship("expression, too large", lambda vocab: {"guided": {"regex": _TOO_LARGE}}, guided=True),
    Hardship("grammar, broken", lambda vocab: {"guided": {"grammar": f'start: "a{next(_NEW)}" nothing'}}, guided=True),
)
"""Those that name something new are compiled anew for each request; the engine keeps the others' grammars."""


class Window(Struct, frozen=True):
    """While one request ran. gap_s: between tokens of whoever is watched, None where it ended before it decoded.
    longest_s: of these, from its submission on. error: the engine's word where it did not finish."""

    gap_s: float | None
    longest_s: float
    error: str | None


class Trial(Struct, frozen=True):
    """A request and a plain one in its place, each by itself and beside streams."""

    alone: Window
    plain_alone: Window
    beside: Window
    plain_beside: Window

    @property
    def own_s(self) -> float | None:
        """What its own token takes longer than a plain one's where nothing else runs."""
        return _more(self.alone, self.plain_alone)

    @property
    def added_s(self) -> float | None:
        """What the others' tokens take longer than beside a plain one."""
        return _more(self.beside, self.plain_beside)


def _more(window: Window, plain: Window) -> float | None:
    return None if window.gap_s is None or plain.gap_s is None else window.gap_s - plain.gap_s


async def attempt(
    world: World, hardship: Hardship, streams: Sequence[Stream], tokens: int, plain_first: bool
) -> tuple[Window, Window]:
    """Beside these streams, or by itself where there are none: the request, and a plain one of as many tokens. Raises
    ConfigError where their pace can't be told."""
    order = (PLAIN, hardship) if plain_first else (hardship, PLAIN)
    first, second = [await _window(world, each, streams, tokens) for each in order]
    return (second, first) if plain_first else (first, second)


async def _window(world: World, hardship: Hardship, streams: Sequence[Stream], tokens: int) -> Window:
    """Raises ConfigError where all tokens come at once, also when there are more."""
    for again in range(ATTEMPTS):
        one = world.ask(world.prompt(PROMPT_TOKENS), max_tokens=tokens << again, **hardship.sampling(world.vocab_size))
        ended = await one.ended()
        for stream in streams:
            await stream.more(1)
        watched = streams or [one]
        longest_s = max((gap for s in watched for gap in s.gaps(one.asked_at, ended)), default=ended - one.asked_at)
        if one.error is not None or len(one.times) < 2:
            return Window(None, longest_s, one.error)
        if gap_s := typical_gap_s(watched, one.times[0], ended):
            return Window(gap_s, longest_s, None)
    raise at_once(len(one.times), "run it where")
