"""What SamplingParams takes, makes of it, and refuses by the field's name."""

import math
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from tllm_core import GuidedDecoding, RequestError, SamplingParams

BAD: list[tuple[str, Any, str]] = [
    ("logit_bias", {1: 101}, r"in \[-100, 100\], not 101"),
    ("logit_bias", {1: math.nan}, "not nan"),
    ("logit_bias", {1: 10**400}, r"in \[-100, 100\]"),
    ("logit_bias", {1: True}, "not True"),
    ("logit_bias", {-1: 1.0}, "not -1"),
    ("logit_bias", {"x": 1.0}, "integers, not 'x'"),
    ("logit_bias", [(1, 1.0), (2, 0.0), (1, 2.0)], "token id 1 twice"),
    ("logit_bias", [(1, 1.0, 2)], "pairs"),
    ("logit_bias", 5, "pairs"),
    ("logit_bias", None, "pairs"),
    ("logit_bias", np.zeros((5, 2)), "pairs of token id and bias, not array"),
    ("bad_token_sequences", np.zeros((5, 2)), "sequences of token ids, not array"),
    ("allowed_token_ids", [], "None allows all"),
    ("allowed_token_ids", [1, -5], "not -5"),
    ("allowed_token_ids", [1, 2**31], "not 2147483648"),
    ("allowed_token_ids", [1, True], "integers, not True"),
    ("allowed_token_ids", 7, "sequence of token ids"),
    ("stop_token_ids", [1.5], "integers, not 1.5"),
    ("bad_words", [""], "non-empty"),
    ("bad_words", [7], "non-empty"),
    ("bad_words", ["a", "\ud800"], "surrogate"),
    ("stop", "\ud800", "surrogate"),
    ("stop", "x" * 1_000_000, "1000000 characters in all, and 65536 are the most"),
    ("stop", [f"{number:05}" for number in range(100_000)], "500000 characters in all, and 65536"),
    ("bad_words", [f"{number:05}" for number in range(100_000)], "500000 characters in all, and 65536"),
    ("temperature", 10**400, r"in \[0.0, 100.0\], not 1000"),
    ("temperature", -(10**400), r"in \[0.0, 100.0\]"),
    ("temperature", 10**5000, "not this int"),
    ("top_p", math.nan, "not nan"),
    ("top_p", 0, r"in \(0.0, 1.0\]"),
    ("seed", 10**5000, "not this int"),
    ("max_tokens", 10**5000, "not this int"),
    ("bad_token_sequences", [[]], "an empty one"),
    ("bad_token_sequences", [[1], 7], "not 7"),
    ("bad_token_sequences", [[1, -1]], "not -1"),
    ("bad_token_sequences", 5, "not 5"),
    ("best_of", 0, r"in \[1, 1024\]"),
    ("best_of", 1.5, "integer"),
    ("logprobs", -1, r"in \[0, 1024\], not -1; those of all tokens can't be had"),
    ("prompt_logprobs", -1, "those of all tokens"),
    ("guided", 5, "GuidedDecoding"),
    ("guided", {}, "takes one of json, json_object, regex, choice, grammar, not none"),
    ("guided", {"regex": "a", "choice": ["b"]}, "not regex and choice"),
    ("guided", {"regex": ""}, "not empty"),
    ("guided", {"regex": 5}, "text"),
    ("guided", {"regex": "\ud800"}, "surrogate"),
    ("guided", {"regex": "a" * 300_000}, "300000 characters"),
    ("guided", {"choice": ["a", ""]}, "choice"),
    ("guided", {"choice": "a"}, "choice"),
    ("guided", {"choice": ["a" * 200_000, "b" * 200_000]}, "400000 characters"),
    ("guided", {"json": "{"}, "not valid JSON"),
    ("guided", {"json": "[]"}, "not list"),
    ("guided", {"json": "5"}, "not int"),
    ("guided", {"json": 0}, "text"),
    ("guided", {"json": False, "regex": "a"}, "not json and regex"),
    ("guided", {"json": "[" * 100_000}, "not valid JSON"),
    ("guided", {"json_object": 1}, "true or false"),
    ("guided", {"regex": "a", "whitespace": None}, "true or false"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD, ids=[f"{field}-{words[:20]}" for field, _, words in BAD])
def test_bad_values_are_refused_by_the_fields_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        SamplingParams(**{field: value}).check()
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def test_fields_that_guided_does_not_have_are_named() -> None:
    with pytest.raises(RequestError, match="no field 'schema'; there are: json, "):
        SamplingParams(guided={"schema": {}})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="can't be written as JSON"):
        SamplingParams(guided={"json": {"a": object()}})  # type: ignore[arg-type]


def test_best_of_is_at_least_n_and_never_streamed() -> None:
    with pytest.raises(RequestError, match="best_of 2 is below n 3") as caught:
        SamplingParams(n=3, best_of=2).check()
    assert caught.value.field == "best_of"
    with pytest.raises(RequestError, match=r"best_of 4 can't be streamed: which 3 of them"):
        SamplingParams(n=3, best_of=4).check(streaming=True)
    SamplingParams(n=3, best_of=3).check(streaming=True)
    assert SamplingParams(n=3).sequences == 3
    assert SamplingParams(n=3, best_of=7).sequences == 7


def test_what_callers_have_becomes_what_cannot_change() -> None:
    bias, allowed, runs, choice = {"5": 1, 6: 2.5}, [3, 4], [[1], (2, 3)], ["a"]
    params = SamplingParams(
        logit_bias=bias,  # type: ignore[arg-type]
        allowed_token_ids=allowed,  # type: ignore[arg-type]
        bad_token_sequences=runs,  # type: ignore[arg-type]
        bad_words="word",  # type: ignore[arg-type]
        guided={"choice": choice},  # type: ignore[arg-type]
    )
    bias["7"], runs[0] = 0, [9]
    allowed.append(9)
    choice.append("b")
    params.check()
    assert params.logit_bias == ((5, 1), (6, 2.5))
    assert params.allowed_token_ids == (3, 4)
    assert params.bad_token_sequences == ((1,), (2, 3))
    assert params.bad_words == ("word",)
    assert params.guided == GuidedDecoding(choice=("a",))
    assert dict(params.largest_ids()) == {"logit_bias": 6, "allowed_token_ids": 4, "bad_token_sequences": 3}


def test_a_schema_may_be_true_or_false() -> None:
    for schema, text in ((True, "true"), (False, "false")):
        guided = GuidedDecoding(json=schema)  # type: ignore[arg-type]
        guided.check()
        assert guided.json == text


def test_a_schema_may_be_given_as_a_mapping() -> None:
    guided = GuidedDecoding(json={"type": "object"})  # type: ignore[arg-type]
    guided.check()
    assert guided.json == '{"type": "object"}'


def test_all_of_it_crosses_the_wire() -> None:
    params = SamplingParams(
        logit_bias=((5, 1.0),),
        allowed_token_ids=(3, 4),
        bad_token_sequences=((1,), (2, 3)),
        best_of=3,
        guided=GuidedDecoding(regex="a+", whitespace=False),
    )
    raw = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(raw, type=SamplingParams) == params


def test_as_many_ids_as_a_vocabulary_has_are_checked_in_little_time() -> None:
    ids = tuple(range(200_000))
    SamplingParams(allowed_token_ids=ids, logit_bias=tuple((token_id, 1.0) for token_id in ids)).check()


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": [*((token_id, 1.0) for token_id in range(100_000)), (99_999, 2.0)]},
        {"logit_bias": [*((token_id, 1.0) for token_id in range(100_000)), (100_000, math.nan)]},
        {"stop_token_ids": [*range(100_000), -1]},
        {"allowed_token_ids": [*range(100_000), 2**31]},
        {"bad_token_sequences": [*([token_id, 1] for token_id in range(100_000)), [-1]]},
        {"bad_token_sequences": [*([token_id, 1] for token_id in range(100_000)), []]},
        {"bad_words": ["a"] * 100_000},
        {"guided": {"choice": ["abc"] * 100_000}},
    ],
)
def test_what_is_wrong_at_the_end_of_many_values_is_found_in_little_time(params: dict[str, Any]) -> None:
    """Quadratic work on 100,000 takes minutes."""
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params).check()
    assert time.process_time() - began < 3
    assert caught.value.field in params


def test_the_longest_stop_strings_are_taken() -> None:
    SamplingParams(stop=["x"] * 65_536, bad_words="y" * 65_536).check()  # type: ignore[arg-type]
