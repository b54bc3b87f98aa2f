"""Tokenizers are loaded without torch, and what can't be loaded is one clear line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tllm_core.errors import ModelError
from tllm_core.text import Tokenizer, as_tokenizer, load_tokenizer


@pytest.fixture
def directory(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> Path:
    tokenizers["byte_level"].inner.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    return tmp_path


def test_a_directory_gives_the_same_tokenizer(tokenizers: dict[str, Tokenizer], directory: Path) -> None:
    loaded, original = load_tokenizer(directory), tokenizers["byte_level"]
    text = "Über <|end|> fox 你好"
    assert loaded.encode(text) == original.encode(text)
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
    assert loaded.byte_level
    assert loaded.vocab_size == original.vocab_size
    assert loaded.convert_ids_to_tokens([loaded.eos_token_id or 0]) == ["<|end|>"]
    assert loaded.eos_token_id in loaded.special_ids


def test_kinds_are_told_apart(tokenizers: dict[str, Tokenizer]) -> None:
    assert {name for name, tokenizer in tokenizers.items() if tokenizer.byte_level} == {"byte_level"}


def test_decoding_never_cleans_up_spaces(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    tokenizer.inner.clean_up_tokenization_spaces = True  # type: ignore[attr-defined]
    assert tokenizer.decode(tokenizer.encode("a . b")) == "a . b"


def test_ids_outside_the_vocabulary_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        assert tokenizer.decode([tokenizer.vocab_size, 2**31 - 1]) == ""


SCRIPT = """
import sys
from tllm_core.text import load_tokenizer
assert "transformers" not in sys.modules
load_tokenizer(sys.argv[1])
print("torch" in sys.modules)
"""


def test_a_plain_tokenizer_is_loaded_without_torch_and_transformers_only_on_demand(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, directory], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_directory_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_a_model_error_of_one_line(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="can't be loaded") as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_config_is_a_model_error(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(["no mapping"]))
    with pytest.raises(ModelError, match="can't be loaded"):
        load_tokenizer(directory)


@pytest.mark.parametrize("name", ["/no/such/directory", "no-such-name", "./no/such", "a/b/c", ""])
def test_a_path_that_is_not_there_is_a_model_error_without_any_network(name: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_tokenizer(name)


def test_a_hub_id_offline_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="the tokenizer of no/such-model can't be loaded"):
        load_tokenizer("no/such-model")


def test_a_file_that_is_no_model_is_a_model_error(directory: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        load_tokenizer(directory / "tokenizer.json")


def test_a_missing_package_says_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm_core.text.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tllm-core\[text\]'"):
        load_tokenizer(directory)


def test_as_tokenizer_takes_paths_tokenizers_and_nothing_else(
    tokenizers: dict[str, Tokenizer], directory: Path
) -> None:
    ours = tokenizers["byte_level"]
    assert as_tokenizer(ours) is ours
    assert as_tokenizer(str(directory)).vocab_size == ours.vocab_size
    assert as_tokenizer(ours.inner).encode("fox") == ours.encode("fox")  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="not int"):
        as_tokenizer(5)
