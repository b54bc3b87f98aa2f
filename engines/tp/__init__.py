"""The engine that runs models: continuous batching over a paged KV cache, in torch. Importing this loads no torch."""

from tllm_core.engines.tp.spec import SPEC, TpSettings

__all__ = ["SPEC", "TpSettings"]
