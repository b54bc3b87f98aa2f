"""A tiny Llama with random weights, the same in every test."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, EOS, LIMIT = 320, 2, 256


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def save_tiny_llama(directory: Path, **sizes: int) -> Path:
    """Two layers of random weights, in `directory`; `sizes` are fields of LlamaConfig that are to be others."""
    usual = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LIMIT,
    }
    config = LlamaConfig(**{**usual, **sizes}, bos_token_id=1, eos_token_id=EOS, initializer_range=0.2)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def text_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer."""
    directory = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(model_dir, directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """A byte-level one of VOCAB tokens, of which the third ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "yes", "count": 12, "true": false, "no": [maybe]} '] * 9, trainer)
    tokenizer.enable_truncation(4)  # some are saved so, and grammars must not care
    tokenizer.save(str(directory / "tokenizer.json"))
