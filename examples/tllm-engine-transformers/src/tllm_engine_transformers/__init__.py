"""An engine for tllm-core: any causal language model of transformers, through its own continuous batching."""

from tllm_engine_transformers.spec import SPEC, TransformersSettings

__all__ = ["SPEC", "TransformersSettings"]
