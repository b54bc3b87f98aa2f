"""LLM: text in, RequestOutput out, over a GenerationExecutor."""

from tllm_core.llm.completion import TextCompletionOutput
from tllm_core.llm.llm import LLM
from tllm_core.llm.output import RequestOutput

__all__ = ["LLM", "RequestOutput", "TextCompletionOutput"]
