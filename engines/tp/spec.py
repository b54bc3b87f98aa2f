"""What the tp engine is called and how it is set."""

from typing import Literal

from msgspec import Struct

from tllm_core.contracts.interfaces import EngineSpec
from tllm_core.errors import ConfigError

MOST_RANKS = 64


class TpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the tp engine.

    model: a directory or GGUF file, else a name of the catalogue, else a hub id with "/". cache_dir: where converted
    models are kept, None = the user's cache directory.
    dtype: of weights, activations and KV cache; "auto" = float32 on a CPU, the model's own on a GPU.
    device: "auto" = a GPU if there is one, else "cpu"; or as torch writes it.
    attention: which library computes attention, norms, rotations and activations; "auto" = FlashInfer on a GPU where it is
    installed and knows the model's type and heads, else torch. attention_kernels: of FlashInfer for prompts.
    cuda_graphs: decoding steps are recorded and replayed, with FlashInfer on a GPU.
    kv_dtype: of the KV cache, "auto" = that of activations; the float8 ones need FlashInfer, and hold keys divided by
    k_scale and values by v_scale.
    threads: CPU threads of torch in each rank, None = the cores that it may use, divided among the ranks.
    tensor_parallel_size: processes that share a model, each with its part of weights and KV cache, and a GPU of its own if
    it runs on GPUs; at most as many as the model has heads. comm: how they meet; "auto" = nccl on GPUs, on CPUs shm
    (memory that they share) where the system allows that, else gloo (sockets).

    max_seq_len: prompt and new tokens together, None = the model's own limit; never above it, but for models whose rope
    stretches ("dynamic"). Models with longrope have other factors where it is above their original length.
    max_num_seqs: sequences that run at once; what is above waits. max_batched_tokens: tokens in one step at most; a
    longer prompt is computed in chunks, and running sequences gain a token beside each, so that a step's time bounds the
    time between tokens. 512 suits a small model on a CPU; GPUs want 2048 to 8192.

    block_size: tokens per block of the KV cache. num_blocks: None = sized from the memory that is free once the weights
    are loaded, of which `memory_fraction` is taken: None = 0.85 of a GPU's; 0.25 of the host's, but at most 4 GiB.
    enable_prefix_cache: blocks of tokens that were computed before are found and used again, by any request of the same
    `cache_salt`, until their memory is needed; the pool fills up with them. False = each request computes its own.
    kv_events: how many of the last events of the KV cache are kept for `executor.kv_events()`; 0 = none.
    seed: makes requests without a seed of their own repeatable from start to start; None = drawn.
    batch_invariant: the logits of a sequence are the same to the bit whatever runs beside it, in chunks or in one, after
    a preemption or not. Several times slower; checked on CPUs, in float32 and bfloat16.
    guided: whether requests may ask for guided decoding, where llguidance is installed and the model has a tokenizer;
    reading its vocabulary takes half a second per 50,000 tokens at the start.
    """

    model: str = "smollm2-135m"
    cache_dir: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attention: Literal["auto", "torch", "flashinfer"] = "auto"
    attention_kernels: Literal["auto", "fa2", "fa3"] = "auto"
    cuda_graphs: bool = True
    kv_dtype: Literal["auto", "float8_e4m3fn", "float8_e5m2"] = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    threads: int | None = None
    tensor_parallel_size: int = 1
    comm: Literal["auto", "nccl", "gloo", "shm"] = "auto"
    max_seq_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    enable_prefix_cache: bool = True
    kv_events: int = 8192
    seed: int | None = None
    batch_invariant: bool = False
    guided: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError, which names the setting, for values that can't work."""
        if not self.model:
            raise ConfigError("model is empty; name a directory, a GGUF file, a catalogue name or a hub id")
        counts = ("tensor_parallel_size", "max_num_seqs", "max_batched_tokens", "block_size")
        for name in (*counts, "threads", "max_seq_len", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.tensor_parallel_size > MOST_RANKS:
            raise ConfigError(f"tensor_parallel_size must be at most {MOST_RANKS}, not {self.tensor_parallel_size}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens {self.max_batched_tokens} is below max_num_seqs {self.max_num_seqs}: every running"
                " sequence needs a token in each step; raise the one or lower the other"
            )
        for name in ("k_scale", "v_scale"):
            if not 0 < getattr(self, name) < 3.4e38:  # kernels take it as a float32
                raise ConfigError(f"{name} must be above 0 and fit in a float32, not {getattr(self, name)}")
        if self.kv_dtype != "auto" and self.attention_kernels == "fa3":
            raise ConfigError(
                f"attention_kernels 'fa3' reads a kv_dtype of {self.kv_dtype} with float8 queries only; leave one out"
            )
        if self.batch_invariant and 256 % self.block_size:
            raise ConfigError(f"batch_invariant needs a block_size that divides 256, not {self.block_size}")
        if self.kv_events < 0:
            raise ConfigError(f"kv_events must be at least 0, not {self.kv_events}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction < 1:
            raise ConfigError(f"memory_fraction must be between 0 and 1, not {self.memory_fraction}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in [0, 2^63), not {self.seed}")


def world_size(settings: TpSettings) -> int:
    return settings.tensor_parallel_size


SPEC = EngineSpec(
    name="tp",
    settings_type=TpSettings,
    load="tllm_core.engines.tp.engine:TpEngine",
    world_size="tllm_core.engines.tp.spec:world_size",
    prepare="tllm_core.engines.tp.prepare:prepare",
    requires=("torch", "safetensors"),
)
