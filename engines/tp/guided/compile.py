"""From what a request asks for to a matcher that is copied for each of its sequences; llguidance is imported here alone."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tllm_core.contracts.messages import GuidedDecoding
from tllm_core.engines.tp.guided.guide import NO_MATCH, Guide, Mask, Stops, words_of
from tllm_core.errors import ModelError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MISSING = "guided decoding needs the package llguidance: pip install 'tllm-core[guided]'"

_LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each; a usual one has some hundreds."""


class Grammar(NamedTuple):
    """Compiled, with the mask of its first token, which can take long. Only copies of `matcher` are ever moved on."""

    matcher: LLMatcher
    first: Mask
    end: int

    def stops(self, token_ids: frozenset[int]) -> Stops:
        """For `start`: what ends the sequences of a request."""
        return Stops.of(token_ids, len(self.first))

    def start(self, stops: Stops) -> Guide:
        """A sequence's guide. stops: what ends it, which may come where the grammar is complete."""
        return Guide(self.matcher.deep_copy(), self.first, self.end, stops)


def load_vocabulary(model_dir: str, vocab: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The model's tokens as llguidance needs them. Holds the interpreter's lock, for half a second per 50,000 tokens.

    Raises ModelError, which says why there can't be guided decoding: no package, no tokenizer, or one of an unknown kind.
    """
    if find_spec("llguidance") is None:
        raise ModelError(MISSING)
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(_tokenizer_json(Path(model_dir)), n_vocab=vocab, eos_token=list(eos_token_ids) or None)
    except (ValueError, OSError, TypeError) as error:
        raise ModelError(f"the tokenizer of {model_dir} allows no guided decoding: {error}") from error


def compile_grammar(vocabulary: LLTokenizer, guided: GuidedDecoding) -> Grammar:
    """Takes up to some hundred milliseconds, most of it without the interpreter's lock. Raises ValueError in words."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary, _source(guided), log_level=0, limits=limits)
    first = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.uint32)
    if not (begun := matcher.deep_copy()).is_error():
        begun.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
    if begun.is_error():  # else the mask would allow nothing but the end, as if the answer were empty
        raise ValueError(words_of(begun))
    return Grammar(matcher, first, vocabulary.eos_token)


def _source(guided: GuidedDecoding) -> str:
    from llguidance import LLMatcher, grammar_from

    if guided.regex is not None:
        return LLMatcher.grammar_from_regex(guided.regex)
    if guided.choice:
        # One terminal: its alternatives cost the lexer little, while those of a rule are 2,000 at most.
        choices = " | ".join(_literal(text) for text in dict.fromkeys(guided.choice))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    if guided.grammar is not None:
        return grammar_from("grammar", guided.grammar)
    schema = '{"type": "object"}' if guided.json is None else guided.json
    if isinstance(anything := json.loads(schema), bool):  # llguidance takes objects alone
        if not anything:
            raise ValueError(NO_MATCH)
        schema = "{}"
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": guided.whitespace})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tokenizer_json(model_dir: Path) -> str:
    """As Hugging Face's `tokenizers` writes it, without the cutting and padding that some are saved with."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        from tllm_core.text import load_tokenizer

        backend = getattr(getattr(load_tokenizer(model_dir), "inner", None), "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"the tokenizer of {model_dir} is none of the fast ones, which guided decoding needs")
        return str(backend.to_str())
    text = path.read_text(encoding="utf-8")
    state = json.loads(text)
    if state.get("truncation") is None and state.get("padding") is None:
        return text
    return json.dumps({**state, "truncation": None, "padding": None}, ensure_ascii=False)
