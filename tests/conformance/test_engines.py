"""Our own engines keep what every engine promises."""

import tempfile
from pathlib import Path
from typing import Any, ClassVar

from tllm_core.conformance.engine import EngineConformance

VOCAB, LIMIT = 320, 192
OWN_ENDS = range(2, VOCAB, 16)
"""So many that a random model comes to one."""


class TestEcho(EngineConformance):
    engine = "echo"
    settings: ClassVar[dict[str, Any]] = {"max_seq_len": 192, "vocab_size": 64, "eos_token_id": 5, "max_batch_size": 16}
    bad_settings: ClassVar[dict[str, Any]] = {"faults": [{"at": "start", "do": "raise", "message": "no weights here"}]}
    many_ranks: ClassVar[dict[str, Any]] = {"world_size": 2}


class TestTp(EngineConformance):
    engine = "tp"
    bad_settings: ClassVar[dict[str, Any]] = {"model": "/nowhere/at/all"}

    @classmethod
    def setup_class(cls) -> None:
        cls.directory = tempfile.TemporaryDirectory(prefix="tllm-tiny-")
        save_tiny_model(Path(cls.directory.name))
        cls.settings = {
            "model": cls.directory.name,
            "max_seq_len": LIMIT,
            "num_blocks": 64,
            "max_num_seqs": 16,
            "max_batched_tokens": 64,
            "threads": 1,
            "kv_events": 1000,
        }

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.directory.cleanup()


def save_tiny_model(directory: Path) -> None:
    """A Llama with random weights, the same every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LIMIT,
        bos_token_id=1,
        eos_token_id=list(OWN_ENDS),
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
