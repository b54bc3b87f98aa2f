"""Text in, text out: sans-IO behind the Tokenizer protocol; `tokenizer.py` alone imports transformers."""
