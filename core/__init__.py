"""tllm-core: the executor boundary for LLM inference."""

__version__ = "0.1.0"
