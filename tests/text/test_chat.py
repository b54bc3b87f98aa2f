"""Chat messages are checked field by field and rendered with the tokenizer's own template."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tllm_core.errors import RequestError
from tllm_core.text import Tokenizer, render_chat

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def chatty(tokenizers: dict[str, Tokenizer]) -> Iterator[Tokenizer]:
    tokenizer = tokenizers["byte_level"]
    tokenizer.inner.chat_template = TEMPLATE  # type: ignore[attr-defined]
    yield tokenizer
    tokenizer.inner.chat_template = None  # type: ignore[attr-defined]


def test_messages_are_rendered_with_and_without_the_beginning_of_the_answer(chatty: Tokenizer) -> None:
    assert render_chat(chatty, [HELLO]) == "<user>hello</><assistant>"
    assert render_chat(chatty, [HELLO], add_generation_prompt=False) == "<user>hello</>"
    assert render_chat(chatty, (HELLO, HELLO), mood="!") == "<user>hello</>" * 2 + "<assistant>!"


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_text_parts_are_joined_by_line_breaks_and_the_caller_s_messages_stay_as_they_are(chatty: Tokenizer) -> None:
    messages = [{"role": "user", "content": text("hello", "you")}, HELLO, {"role": "user", "content": []}]
    before = copy.deepcopy(messages)
    assert render_chat(chatty, messages) == "<user>hello\nyou</><user>hello</><user></><assistant>"
    assert messages == before


def test_a_template_that_takes_parts_itself_gets_them(chatty: Tokenizer) -> None:
    chatty.inner.chat_template = (  # type: ignore[attr-defined]
        "{% for m in messages %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endfor %}"
    )
    assert render_chat(chatty, [{"role": "user", "content": text("a", "b")}]) == "(a)(b)"


def test_parts_that_are_no_text_are_refused_by_name(chatty: Tokenizer) -> None:
    content = [*text("look:"), {"type": "image_url", "image_url": {"url": "http://somewhere"}}]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\] .* 'image_url', and only 'text'") as caught:
        render_chat(chatty, [{"role": "user", "content": content}])
    assert caught.value.field == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        (HELLO, "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([HELLO, {"content": "x"}], "messages[1].role"),
        ([HELLO, {"role": 3, "content": "x"}], "messages[1].role"),
        ([HELLO, {"role": "", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_a_malformed_message_is_refused_by_field(chatty: Tokenizer, messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        render_chat(chatty, messages)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_what_the_template_refuses_is_a_request_error_in_its_own_words(chatty: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no tools here"):
        render_chat(chatty, [{"role": "tool", "content": "x"}])


def test_a_tokenizer_without_a_template_says_so(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(tokenizers["words"], [HELLO])
