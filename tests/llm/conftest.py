"""A small real tokenizer with a chat template, and the echo engine behind an LLM."""

from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tllm_core import LLM
from tllm_core.text import Tokenizer, as_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ mood }}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the quick brown fox, 你好 🙂 " * 9], trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return as_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE))


@pytest.fixture(scope="session")
def llm(tokenizer: Tokenizer) -> Iterator[LLM]:
    with LLM(
        engine="echo", transport="inproc", launcher="inline", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    ) as llm:
        yield llm
