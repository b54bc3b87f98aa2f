"""What the engine is called and how it is set. Imported wherever settings are read, so that it imports nothing heavy."""

from typing import Literal

from msgspec import Struct

from tllm_core.contracts.interfaces import EngineSpec
from tllm_core.errors import ConfigError


class TransformersSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the transformers engine.

    model: a directory, or a hub id. dtype: of weights and KV cache; "auto" = as the model was saved.
    device: "auto" = a GPU if there is one, else "cpu"; or as torch writes it.
    max_seq_len: prompt and new tokens together, None = as much as the model and the KV cache allow.
    max_num_seqs: requests in one forward pass at most. max_batched_tokens: tokens in one; longer prompts are split.
    kv_tokens: tokens that the KV cache holds, of all requests together; rounded up to whole pages of 256.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_seq_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    kv_tokens: int = 16384

    def __post_init__(self) -> None:
        """Raises ConfigError, which names the setting, for values that can't work."""
        if not self.model:
            raise ConfigError("model is empty; name a directory or a hub id")
        for name in ("max_seq_len", "max_num_seqs", "max_batched_tokens", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


SPEC = EngineSpec(
    name="transformers",
    settings_type=TransformersSettings,
    load="tllm_engine_transformers.engine:TransformersEngine",
    requires=("torch", "transformers"),
)
