"""Which requests the echo engine takes."""

from typing import Any

import msgspec

from tllm_core.contracts.messages import EngineRequest, SamplingParams
from tllm_core.engines.echo.spec import EchoSettings
from tllm_core.errors import RequestError

SUPPORTS = frozenset(
    {
        "n",
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "cache_salt",
        "extra",
    }
)
_REFUSED: tuple[tuple[str, Any], ...] = tuple(
    (field.name, field.default)
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in SUPPORTS | {"skip_special_tokens"}
)


def check(request: EngineRequest, settings: EchoSettings) -> None:
    """Raises RequestError, which names the field, for what this engine would have to ignore or could never end."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    for name, default in _REFUSED:
        if getattr(sampling, name) != default:
            raise RequestError(f"the echo engine does not support {name}", field=name)
    if not len(prompt):
        raise RequestError("prompt_token_ids is empty", field="prompt_token_ids")
    if (largest := max(prompt.view)) >= settings.vocab_size:
        raise RequestError(
            f"prompt_token_ids has the token id {largest}, and the vocabulary ends at {settings.vocab_size - 1}",
            field="prompt_token_ids",
        )
    wanted = sampling.max_tokens or 1
    if len(prompt) + wanted > settings.max_seq_len:
        raise RequestError(
            f"prompt of {len(prompt)} tokens and max_tokens {wanted} exceed max_seq_len {settings.max_seq_len}",
            field="max_tokens",
        )
    if sampling.n > settings.max_batch_size:
        raise RequestError(f"n {sampling.n} exceeds max_batch_size {settings.max_batch_size}", field="n")
