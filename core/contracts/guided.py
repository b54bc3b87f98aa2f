"""What a guided answer must match: one of a JSON schema, a regular expression, choices or a grammar."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

from tllm_core.contracts.values import is_unicode, shown
from tllm_core.errors import RequestError

MAX_TEXT = 262_144
"""Characters of a schema, expression or grammar at most, and of all choices together."""

KINDS = ("json", "json_object", "regex", "choice", "grammar")


class GuidedDecoding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """Exactly one kind is given. The whole answer matches it, unless max_tokens or a stop ends it earlier.

    json: a JSON schema, as text, or as a mapping, True (any JSON) or False (none at all), which become text. json_object: any
    JSON object. regex: of the whole answer; no look-around, no back-references. choice: the possible answers. grammar: in
    Lark's notation, or in the EBNF of llama.cpp (GBNF); the rule to begin with is `start` in the one, `root` in the other.
    whitespace: whether JSON may have any between its tokens; a small model may then write nothing else.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    whitespace: bool = True

    def __post_init__(self) -> None:
        if isinstance(schema := getattr(self, "json"), Mapping | bool):  # noqa: B009 - the declared type is what it becomes here
            force_setattr(self, "json", _as_text(schema))
        if isinstance(choice := getattr(self, "choice"), list):  # noqa: B009
            force_setattr(self, "choice", tuple(choice))

    def check(self) -> None:
        """Raises RequestError, of the field `guided`, for anything that can't be a grammar; it is not compiled here."""
        for name in ("json_object", "whitespace"):
            if type(getattr(self, name)) is not bool:
                raise _error(f"{name} must be true or false, not {shown(getattr(self, name))}")
        _check_choice(self.choice)
        given = [name for name in KINDS if not any(getattr(self, name) is nothing for nothing in (None, False, ()))]
        if len(given) != 1:
            raise _error(f"takes one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        for name in ("json", "regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text)
        if self.json is not None:
            _check_json(self.json)


def _error(problem: str) -> RequestError:
    return RequestError(f"guided {problem}", field="guided")


def _as_text(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"json can't be written as JSON: {error}") from None


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise _error(f"{name} must be text that is not empty, not {shown(text)}")
    if len(text) > MAX_TEXT:
        raise _error(f"{name} has {len(text)} characters, and {MAX_TEXT} are the most")
    if not is_unicode(text):
        raise _error(f"{name} holds half of a surrogate pair, which is no Unicode text")


def _check_choice(choice: object) -> None:
    if not isinstance(choice, tuple) or any(not isinstance(each, str) or not each for each in choice):
        raise _error(f"choice must be a sequence of texts that are not empty, not {shown(choice)}")
    if choice:
        _check_text("choice", "".join(choice))


def _check_json(schema: str) -> None:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _error(f"json is not valid JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise _error(f"json must be a schema, which is an object, true or false, not {type(parsed).__name__}")
