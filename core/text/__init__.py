"""Text in, text out: sans-IO behind the Tokenizer protocol; `tokenizer.py` alone imports transformers."""

from tllm_core.text.chat import check_messages, render_chat
from tllm_core.text.detokenizer import Detokenizer, Vocabulary
from tllm_core.text.protocol import Message, Tokenizer
from tllm_core.text.sequence import SequenceText, sequences_of
from tllm_core.text.stops import Match, StopScanner, StopStrings
from tllm_core.text.tokenizer import as_tokenizer, load_tokenizer
from tllm_core.text.words import token_sequences

__all__ = [
    "Detokenizer",
    "Match",
    "Message",
    "SequenceText",
    "StopScanner",
    "StopStrings",
    "Tokenizer",
    "Vocabulary",
    "as_tokenizer",
    "check_messages",
    "load_tokenizer",
    "render_chat",
    "sequences_of",
    "token_sequences",
]
