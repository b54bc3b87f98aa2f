"""The shapes in which callers give prompts and sampling parameters: one, or a sequence of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tllm_core.contracts.messages import SamplingParams, TokenIds
from tllm_core.errors import RequestError

Params: TypeAlias = SamplingParams | Mapping[str, Any] | None


def is_one_prompt(prompts: object) -> bool:
    """Text or the token ids of one prompt, as against a sequence of prompts."""
    if isinstance(prompts, str | TokenIds):
        return True
    with contextlib.suppress(TypeError):
        return memoryview(prompts).ndim == 1  # type: ignore[arg-type]
    return isinstance(prompts, Sequence) and bool(prompts) and hasattr(prompts[0], "__index__")


def many_prompts(prompts: object) -> list[Any]:
    """The prompts of any iterable. Raises RequestError for what is neither one prompt nor several."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        kind = type(prompts).__name__
        raise RequestError(f"prompts must be one prompt or a sequence of prompts, not {kind}", field="prompts")
    return list(prompts)


def per_prompt(params: Params | Sequence[Params], count: int) -> Sequence[Params]:
    """One set of parameters for each of `count` prompts. Raises RequestError where the numbers differ."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"sampling_params must be SamplingParams, or one for each prompt, not {type(params).__name__}",
            field="sampling_params",
        )
    if len(params) != count:
        raise RequestError(
            f"there are {len(params)} sampling_params for {count} prompts; give one for all, or one each",
            field="sampling_params",
        )
    return params
