"""Owns the model and its KV cache, and runs one scheduled batch at a time."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from tllm_core.engines.tp.attention import AttentionMetadata
from tllm_core.engines.tp.attention.torch import TorchAttention
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.config import ModelConfig, read_config
from tllm_core.engines.tp.memory import available_bytes
from tllm_core.engines.tp.model import Llama
from tllm_core.engines.tp.prepare import resolve
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.engines.tp.weights import Checkpoint
from tllm_core.errors import ConfigError

_HOST_FRACTION, _HOST_MOST_BYTES, _GPU_FRACTION = 0.25, 4 << 30, 0.85

Phase = Callable[[str, float | None], None]


class Runner:
    """`config`, `num_blocks` and `max_seq_len` are known once `load` returned."""

    config: ModelConfig
    num_blocks: int
    max_seq_len: int

    def __init__(self, settings: TpSettings) -> None:
        self.settings = settings
        self.device = _device(settings.device)
        self._model: Llama | None = None
        self._attention: TorchAttention | None = None

    def load(self, phase: Phase) -> None:
        """Resolves the model, reads its weights and allocates the cache; `phase(name, done)` says what it is doing.

        Raises ConfigError or ModelError for a model or setting that can't be used.
        """
        torch.set_num_threads(self.settings.threads or _usable_cores())
        phase("resolving the model", None)
        directory = resolve(self.settings.model, self.settings.cache_dir, phase)
        self.config = read_config(directory, _name(self.settings.model))
        self.max_seq_len = self._limit()
        dtype = self._dtype()
        phase("loading weights", 0.0)
        with Checkpoint(directory) as checkpoint:
            self._model = Llama(
                self.config,
                checkpoint,
                dtype=dtype,
                device=self.device,
                max_positions=self.max_seq_len,
                progress=lambda done: phase("loading weights", done),
            )
        phase("allocating the KV cache", None)
        self._allocate(self._model.dtype)

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """float32 logits [len(batch.logits_rows), vocab] on the model's device."""
        assert self._model is not None
        assert self._attention is not None
        metadata = AttentionMetadata.of(batch, self.settings.block_size)
        with torch.inference_mode():
            self._attention.plan(metadata)
            token_ids = torch.frombuffer(batch.token_ids, dtype=torch.int32).to(self.device)
            rows = None
            if len(batch.logits_rows) != len(batch.token_ids):
                rows = torch.tensor(batch.logits_rows, dtype=torch.int32, device=self.device)
            return self._model.forward(token_ids, metadata.positions.to(self.device), rows, self._attention)

    def close(self) -> None:
        """Frees the weights and the cache."""
        self._model = self._attention = None

    def _limit(self) -> int:
        most, asked = self.config.max_position_embeddings, self.settings.max_seq_len
        if asked is not None and asked > most:
            raise ConfigError(f"max_seq_len {asked} is above the {most} positions that {self.config.name} has")
        return asked or most

    def _dtype(self) -> torch.dtype:
        name: str = self.settings.dtype
        if name == "auto":
            name = "float32" if self.device.type == "cpu" else self.config.torch_dtype
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype {name!r} of {self.config.name} is not known; set dtype to float32 or bfloat16")
        return dtype

    def _allocate(self, dtype: torch.dtype) -> None:
        config, block_size = self.config, self.settings.block_size
        row = config.num_kv_heads * config.head_dim * dtype.itemsize
        block_bytes = 2 * config.num_layers * block_size * row
        self.num_blocks = self.settings.num_blocks or self._fitting_blocks(block_bytes)
        try:
            self._attention = TorchAttention(
                num_layers=config.num_layers,
                num_blocks=self.num_blocks,
                block_size=block_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=self.device,
            )
        except (RuntimeError, OSError, MemoryError) as error:
            raise ConfigError(
                f"no room for the KV cache: {self.num_blocks} blocks take {self.num_blocks * block_bytes >> 20} MiB, and"
                f" {available_bytes(self.device) >> 20} MiB are free; set num_blocks lower, or leave it out"
            ) from error

    def _fitting_blocks(self, block_bytes: int) -> int:
        """As many blocks as the share of free memory holds, but no more than all sequences at full length need."""
        free = available_bytes(self.device)
        if self.device.type == "cpu":
            share = free * (self.settings.memory_fraction or _HOST_FRACTION)
            if self.settings.memory_fraction is None:
                share = min(share, _HOST_MOST_BYTES)
        else:
            share = free * (self.settings.memory_fraction or _GPU_FRACTION)
        per_sequence = -(-self.max_seq_len // self.settings.block_size)
        blocks = min(int(share) // block_bytes, per_sequence * self.settings.max_num_seqs)
        if blocks < 1:
            raise ConfigError(
                f"no room for the KV cache: {free >> 20} MiB are free and one block takes {block_bytes >> 10} KiB;"
                " set num_blocks or memory_fraction, or free memory"
            )
        return blocks


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is none that torch knows; try 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is not usable: torch finds no CUDA device here; set device to 'cpu'")
    return device


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _name(model: str) -> str:
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model
