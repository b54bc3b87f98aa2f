"""`tllm demo`, `generate` and `chat` with a real model, which is fetched and converted at the first run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TLLM = Path(sys.executable).with_name("tllm")
MODEL = ("--model", "smollm2-135m", "--dtype", "float32")


def tllm(*arguments: str, folder: Path, stdin: str = "") -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TLLM_") or key == "TLLM_CACHE"}
    done = subprocess.run(
        [TLLM, *arguments],
        input=stdin,
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_answers_and_says_how_fast(tmp_path: Path) -> None:
    printed = tllm("demo", "--max-tokens", "24", folder=tmp_path)
    assert "is ready after" in printed
    assert re.search(
        r"^The answer has \d+ tokens: the first came after \d+ ms, the rest at [\d.]+ tokens per second\.$",
        printed,
        re.MULTILINE,
    )
    assert "Paris" in printed


def test_generate_continues_raw_text_and_answers_messages(tmp_path: Path) -> None:
    prompt = "The capital of France is"
    raw = json.loads(tllm("generate", prompt, "--raw", *MODEL, "--max-tokens", "8", "--json", folder=tmp_path))
    assert "Paris" in raw["text"]
    assert len(raw["token_ids"]) == 8
    assert raw["finish_reason"] == "length"
    streamed = tllm("generate", "-", "--raw", *MODEL, "--max-tokens", "8", folder=tmp_path, stdin=prompt)
    assert streamed == raw["text"] + "\n"
    answered = json.loads(tllm("generate", prompt, *MODEL, "--max-tokens", "24", "--json", folder=tmp_path))
    assert answered["text"] != raw["text"]


def test_generate_ends_before_a_stop_string(tmp_path: Path) -> None:
    arguments = ("--raw", *MODEL, "--max-tokens", "32", "--stop", "Paris", "--json")
    answer = json.loads(tllm("generate", "The capital of France is", *arguments, folder=tmp_path))
    assert "Paris" not in answer["text"]
    assert answer["finish_reason"] == "stop"


def test_chat_answers_each_line_of_its_input_and_remembers_until_told_to_forget(tmp_path: Path) -> None:
    first, second = "What is the capital of France?", "And of Italy?"
    stdin = "\n".join([first, "", second, "/clear", second, "/clear", first])
    one_line_each = ("--max-tokens", "16", "--stop", "\n")
    answers = tllm("chat", *MODEL, *one_line_each, folder=tmp_path, stdin=stdin).splitlines()
    assert len(answers) == 4
    assert "Paris" in answers[0]
    assert answers[1] != answers[2]
    assert answers[3] == answers[0]
