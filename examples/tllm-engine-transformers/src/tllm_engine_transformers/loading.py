"""From settings to a model and transformers' continuous batching for it, not yet started."""

from math import ceil

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState

from tllm_core.errors import ConfigError, ModelError
from tllm_core.text import load_tokenizer
from tllm_engine_transformers.requests import Limits
from tllm_engine_transformers.spec import TransformersSettings

PAGE_TOKENS = 256
"""Of the KV cache. The fastest attention kernels take no smaller ones."""


def load_model(settings: TransformersSettings) -> PreTrainedModel:
    """Raises ModelError for a model that can't be had, ConfigError for a device that is not there."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {settings.model!r} can't be loaded: {error}") from error
    try:
        return model.to(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {settings.device!r} can't be used: {error}") from error


def make_manager(model: PreTrainedModel, settings: TransformersSettings, limits: Limits) -> ContinuousBatchingManager:
    """With its KV cache. Raises ConfigError where that can't hold one sequence of max_seq_len tokens."""
    manager = model.init_continuous_batching(
        # Fresh, rather than the model's own, which may ask for sampling and penalties.
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=ceil(settings.kv_tokens / PAGE_TOKENS),
            max_batch_tokens=settings.max_batched_tokens,
            max_requests_per_batch=settings.max_num_seqs,
        ),
    )
    manager.warmup()
    # One that did not fit would end transformers' thread, and every other request with it.
    cache, longest = manager.batch_processor.cache, limits.max_seq_len
    if not cache.can_store_request_tokens(RequestState("", []), longest, dry_run=True):
        raise ConfigError(f"kv_tokens {settings.kv_tokens} can't hold a sequence of max_seq_len {longest}; raise it")
    return manager


def limits_of(model: PreTrainedModel, settings: TransformersSettings) -> Limits:
    """Raises ConfigError for a max_seq_len beyond what model and KV cache allow."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None)
    limit = min(own or settings.kv_tokens, settings.kv_tokens)
    wanted = settings.max_seq_len or limit
    if wanted > limit:
        raise ConfigError(
            f"max_seq_len {wanted} is above {limit}: the model's own limit is {own}, and kv_tokens {settings.kv_tokens}"
        )
    eos = model.generation_config.eos_token_id
    return Limits(config.vocab_size, wanted, () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos))


def tokenizer_of(settings: TransformersSettings) -> str | None:
    """The model's name where a tokenizer comes with it."""
    try:
        load_tokenizer(settings.model)
    except ModelError:
        return None
    return settings.model
