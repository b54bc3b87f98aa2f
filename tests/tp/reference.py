"""Small models of every family with random weights, what transformers computes with them, and ours beside it."""

from array import array
from pathlib import Path
from typing import Any, Protocol

import torch

from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.spec import TpSettings

VOCAB, POSITIONS = 160, 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]}
_SLIDING, _FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with 9 heads on 3": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama with one kv head": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama with an odd vocabulary": ("Llama", {"vocab_size": 161, "intermediate_size": 83}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 24, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "sliding_window": 21,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
                _FULL: {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            },
        },
    ),
    "gemma3 with capped logits": ("Gemma3", {"head_dim": 16, "sliding_window": 50, "final_logit_softcapping": 3.0}),
    "phi3": ("Phi3", {}),
    "phi3 with a window": ("Phi3", {"sliding_window": 30, "num_key_value_heads": 1}),
    "phi3 with longrope in a part of each head": (
        "Phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                **_LONG,
            },
        },
    ),
}
"""What `reference` is called with."""


class Executes(Protocol):
    """One runner, or all ranks of a model."""

    def execute(self, batch: ScheduledBatch) -> torch.Tensor | None: ...


def reference(family: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A small model of transformers whose logits are spread widely enough for 1e-4 to mean something.

    family: as its classes begin, "Llama" or "Gemma3".
    """
    import transformers

    torch.manual_seed(seed)
    config_type = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    small = {**_SIZES, "pad_token_id": 0, "eos_token_id": 2}
    model = getattr(transformers, f"{family}ForCausalLM")(config_type(**{**small, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def load(directory: Path, **settings: Any) -> Runner:
    """This model's only rank."""
    runner = Runner(TpSettings(**{"model": str(directory), "num_blocks": 64, "threads": 2, **settings}))
    runner.load(lambda name, done: None)
    return runner


def forward(
    runner: Executes, parts: list[tuple[list[int], int, list[int]]], rows: list[int] | None = None
) -> torch.Tensor:
    """Runs (new tokens, context length, block table) per sequence; logits of all tokens unless `rows` says which."""
    tokens = array("i", [token for new, _, _ in parts for token in new])
    logits = runner.execute(
        ScheduledBatch(
            token_ids=tokens,
            query_lens=[len(new) for new, _, _ in parts],
            context_lens=[context for _, context, _ in parts],
            block_tables=[table for _, _, table in parts],
            logits_rows=list(range(len(tokens))) if rows is None else rows,
        )
    )
    assert logits is not None
    return logits


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    """transformers' logits [len(prompt), vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def prompt_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()
