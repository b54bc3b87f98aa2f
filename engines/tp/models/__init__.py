"""The model families that the tp engine runs: one decoder, and what each family has of its own, a file each."""

from typing import Any

from tllm_core.engines.tp.models.family import Family
from tllm_core.engines.tp.models.gemma3 import GEMMA3
from tllm_core.engines.tp.models.llama import LLAMA
from tllm_core.engines.tp.models.mistral import MISTRAL
from tllm_core.engines.tp.models.phi3 import PHI3
from tllm_core.engines.tp.models.qwen import QWEN2, QWEN3
from tllm_core.errors import ModelError

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3)


def family_of(raw: dict[str, Any]) -> Family:
    """The family of a config.json, by its architecture, or by its model type where it names none.

    Raises ModelError, which lists what is supported, for any other.
    """
    named = (raw.get("architectures") or [None])[0]
    for family in FAMILIES:
        if named == family.architecture or (named is None and raw.get("model_type") == family.model_type):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(
        f"architecture {named or raw.get('model_type', 'unknown')!r} is not supported; supported are {supported}"
    )
