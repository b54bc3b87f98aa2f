"""Options of `tllm generate` and `chat` for what an answer may be: biases, words that may not come, and guided decoding."""

import argparse
from pathlib import Path
from typing import Any

from tllm_core.errors import ConfigError


def add_limits(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    group.add_argument(
        "--logit-bias",
        action="append",
        metavar="ID=X",
        help="add X, in [-100, 100], to the logit of this token id; may be repeated",
    )
    group.add_argument("--bad-word", action="append", metavar="TEXT", help="keep this out; may be repeated")
    group.add_argument("--json-schema", metavar="TEXT|@FILE", help="answer with JSON that matches this schema")
    group.add_argument("--regex", metavar="TEXT", help="answer with what matches this expression as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these; repeat it")
    group.add_argument("--grammar", metavar="TEXT|@FILE", help="answer with what this Lark or GBNF grammar describes")


def given_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that they are. Raises ConfigError for what can't be read."""
    given: dict[str, Any] = {}
    if arguments.logit_bias:
        given["logit_bias"] = tuple(map(_bias, arguments.logit_bias))
    if arguments.bad_word:
        given["bad_words"] = tuple(arguments.bad_word)
    guided = {
        "json": _text(arguments.json_schema),
        "regex": arguments.regex,
        "choice": tuple(arguments.choice) if arguments.choice else None,
        "grammar": _text(arguments.grammar),
    }
    guided = {name: value for name, value in guided.items() if value is not None}
    return given | ({"guided": guided} if guided else {})


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias {text!r} must be a token id and a number, as in 1234=-5.5") from None


def _text(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given[1:]} can't be read: {error}") from None
