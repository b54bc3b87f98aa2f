"""GGUF to a Hugging Face directory, by transformers. The only place of this engine that imports it, and only when asked."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tllm_core.errors import ModelError

Progress = Callable[[str, float | None], None]

_MAGIC = b"GGUF"


def convert_gguf(source: Path, target: Path, eos_token_ids: Sequence[int], progress: Progress) -> None:
    """Writes config, float32 safetensors, tokenizer and chat template into `target`: exactly the values of the GGUF.

    `eos_token_ids`: what ends a generation, () = what the file says. Raises ModelError for a file that can't be read.
    """
    check_gguf(source)
    progress("loading the converter", None)
    try:
        with _no_bars():
            import torch
            from safetensors import SafetensorError
            from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
            from transformers.utils import logging
    except ImportError as error:
        raise ModelError(
            f"converting {source.name} needs transformers: pip install 'tllm-core[engine]' ({error})"
        ) from None
    logging.disable_progress_bar()
    directory, file = str(source.parent), source.name
    progress("converting the tokenizer", None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file)
        progress("converting the weights", None)
        # Without `dequantize` the model counts as quantized, and save_pretrained refuses it.
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            gguf_file=file,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_whole` names them
        )
    except (ValueError, KeyError, RuntimeError, EOFError, IndexError, NotImplementedError, ImportError) as error:
        raise ModelError(f"{source} can't be converted: {type(error).__name__}: {error}") from None
    _check_whole(source, found)
    ids = list(eos_token_ids) or [tokenizer.eos_token_id]
    model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else ids
    progress("writing the converted model", None)
    try:
        model.save_pretrained(target)
    except SafetensorError as error:
        # Its message is all that is left of the system's error number.
        raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error)) from None
    tokenizer.save_pretrained(target)


def _check_whole(source: Path, found: Mapping[str, Any]) -> None:
    """transformers fills what it did not find, or reads in other sizes than the file has, with random numbers."""
    for key, ours, theirs in found["mismatched_keys"]:
        raise ModelError(
            f"{source} can't be converted: transformers takes {key} to be {list(theirs)}, and it is {list(ours)} there;"
            " use the model's own directory of safetensors"
        )
    for key in found["missing_keys"]:
        raise ModelError(
            f"{source} can't be converted: it lacks {key}, or transformers does not know what it is called"
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """tqdm reads this once, when it is imported; `progress` speaks instead."""
    before = os.environ.get("TQDM_DISABLE")
    os.environ["TQDM_DISABLE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TQDM_DISABLE")
        if before is not None:
            os.environ["TQDM_DISABLE"] = before


def check_gguf(source: Path) -> None:
    """Raises ModelError for a file that is no GGUF, or is shorter than its own table of tensors says."""
    with source.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{source} is no GGUF file")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"reading {source.name} needs gguf: pip install 'tllm-core[engine]' ({error})") from None
    try:
        reader = GGUFReader(source)
        whole = all(tensor.data_offset + tensor.n_bytes <= source.stat().st_size for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError):
        whole = False
    if not whole:
        raise ModelError(f"{source} is truncated or damaged; fetch it again")
