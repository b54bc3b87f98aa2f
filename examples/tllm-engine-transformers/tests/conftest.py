"""A tiny model, made here: nothing is downloaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, LIMIT = 320, 384
OWN_ENDS = tuple(range(2, VOCAB, 16))
"""So many that a random model comes to one."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, the same every time, and a tokenizer whose words are w0 to w319."""
    directory = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LIMIT,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=list(OWN_ENDS),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def settings(tiny_model: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "dtype": "float32", "device": "cpu", "kv_tokens": 4096}
