"""Owns one rank's part of the model and of its KV cache, and runs one scheduled batch at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tllm_core.engines.tp.attention import AttentionBackend, AttentionMetadata, AttentionShape
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.comm import Alone, Group
from tllm_core.engines.tp.comm.agree import least, meeting, texts, together
from tllm_core.engines.tp.config import ModelConfig, name_of, read_config
from tllm_core.engines.tp.devices import device_of, usable_cores
from tllm_core.engines.tp.graphs import DecodeGraphs
from tllm_core.engines.tp.invariant import whole_threads
from tllm_core.engines.tp.kernels import choose
from tllm_core.engines.tp.memory import available_bytes, give_back
from tllm_core.engines.tp.models.decoder import Decoder
from tllm_core.engines.tp.models.loader import Loader
from tllm_core.engines.tp.models.shard import Shard, shard_of
from tllm_core.engines.tp.prepare import resolve
from tllm_core.engines.tp.profiling import Profiling
from tllm_core.engines.tp.rope import most_positions
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.engines.tp.weights import Checkpoint
from tllm_core.errors import ConfigError, ControlError, ModelError

_HOST_FRACTION, _HOST_MOST_BYTES, _GPU_FRACTION = 0.25, 4 << 30, 0.85

Phase = Callable[[str, float | None], None]


class Runner:
    """`config`, `num_blocks` and `max_seq_len` are known once `load` returned.

    What reads, computes or measures is collective: all ranks of `group` do the same, in the same order.
    """

    config: ModelConfig
    shard: Shard
    directory: Path
    num_blocks: int
    max_seq_len: int
    parted: Exception | None = None
    """What left the ranks at different places: nothing can be computed any more, and the world has to end."""

    def __init__(self, settings: TpSettings, group: Group | None = None) -> None:
        """`group`: the ranks of this model, None = this one alone."""
        self.settings, self.group = settings, group or Alone()
        self.device = device_of(settings.device, self.group.rank, self.group.size)
        self._model: Decoder | None = None
        self._attention: AttentionBackend | None = None
        self._graphs: DecodeGraphs | None = None
        self._profiling = Profiling(self.device)

    def load(self, phase: Phase) -> None:
        """Resolves the model, reads its weights and allocates the cache; `phase(name, done)` says what it is doing.

        Raises ConfigError or ModelError for a model or setting that can't be used.
        """
        threads = self.settings.threads or max(1, usable_cores() // self.group.size)
        torch.set_num_threads(whole_threads(threads) if self.settings.batch_invariant else threads)
        phase("resolving the model", None)
        directory = resolve(self.settings.model, self.settings.cache_dir, phase)
        self.config = read_config(directory, name_of(self.settings.model))
        self.shard = shard_of(self.config, self.group.rank, self.group.size)
        self.max_seq_len = self._limit()
        self.directory = directory
        self._kernels = choose(self.settings, self.device, self._dtype(), self.config.head_dim)
        phase("loading weights", 0.0)
        self._model = self._read(directory, self.device, lambda done: phase("loading weights", done))
        phase("allocating the KV cache", None)
        self._size(self._model.dtype)
        self._allocate()
        self._prepare(lambda done: phase("preparing kernels", done))

    def _read(
        self, directory: Path, device: torch.device, progress: Callable[[float], None] = lambda done: None
    ) -> Decoder:
        with Checkpoint(directory) as checkpoint:
            loader = Loader(self.config, checkpoint, self.group, self._kernels.ops, self._dtype(), device)
            model = Decoder(loader, self.max_seq_len, progress)
        if self.settings.batch_invariant:
            model.compute_in_blocks()
        return model

    def execute(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """float32 logits [len(batch.logits_rows), vocab] on the model's device on rank 0; None on others."""
        assert self._model is not None
        assert self._attention is not None
        metadata = AttentionMetadata.of(batch, self.settings.block_size)
        with torch.inference_mode():
            if batch.copies:
                sources, targets = zip(*batch.copies, strict=True)
                self._attention.copy(sources, targets)
            token_ids = torch.frombuffer(batch.token_ids, dtype=torch.int32)
            if self._graphs is not None and self._graphs.take(batch, metadata):
                return self._graphs.run(token_ids, metadata)
            self._attention.plan(metadata)
            rows = None
            if len(batch.logits_rows) != len(batch.token_ids):
                rows = torch.tensor(batch.logits_rows, dtype=torch.int32, device=self.device)
            return self._model.forward(
                token_ids.to(self.device), metadata.positions.to(self.device), rows, self._attention
            )

    def clear(self, blocks: Sequence[int]) -> None:
        """Makes these blocks of the cache zero."""
        if blocks and self._attention is not None:
            self._attention.clear(blocks)

    def renew_cache(self) -> None:
        """Gives the memory of the whole cache back and takes as much new. Raises ConfigError where there is no room."""
        self._graphs = self._attention = None
        with together(self.group):
            self._allocate()
        self._prepare_anew()

    def sleep(self, level: int) -> None:
        """Frees the cache. Level 1 puts a GPU's weights aside in the host's memory, level 2 frees them everywhere."""
        self._graphs = self._attention = None
        if level > 1:
            self._model = None
        elif self._model is not None and self.device.type != "cpu":
            self._model.move_to(torch.device("cpu"))
        give_back(self.device)

    def wakeup(self) -> None:
        """Undoes `sleep`: weights that were freed are read anew. May be tried again after it raised ConfigError or ModelError."""
        with together(self.group):
            if self._model is None:
                self._model = self._read(self.directory, self.device)
            elif self.device.type != "cpu":
                self._model.move_to(self.device)
            asleep = self._attention is None
            if asleep:
                self._allocate()
        if asleep:
            try:
                self._prepare_anew()
            except ConfigError:
                self._attention = None
                raise

    def update(self, directory: Path) -> None:
        """Weights of the same shapes from another directory; the old ones stay where that raises ConfigError or ModelError.

        Where weights were freed, the new ones are only checked: `wakeup` reads them.
        """
        model = None
        with together(self.group):
            if (directory / "config.json").is_file():
                _check_same(self.config, read_config(directory), directory)
            if self._model is None:
                self._read(directory, torch.device("meta"))
            else:
                self._check_room(directory)
                model = self._read(directory, self.device)
        if model is not None:
            old, self._graphs, self._model = self._model, None, model
            try:
                self._prepare_anew()
            except ConfigError:
                self._model = old  # whose steps are not recorded any more
                raise
            give_back(self.device)
        self.directory = directory

    def start_profile(self, directory: str) -> list[str]:
        """On rank 0 what each rank's profiler says of `directory`. Raises ControlError where one can't be started."""
        try:
            with together(self.group):
                told = self._profiling.start(directory)
        except ControlError:
            raise
        except ConfigError:
            self._profiling.close()  # another rank could not
            raise
        return texts(self.group, told)

    def stop_profile(self) -> list[str]:
        """On rank 0 the paths of all ranks' traces. Raises ControlError where none runs or one can't be written."""
        with together(self.group):
            path = self._profiling.stop()
        return texts(self.group, path)

    def _check_room(self, directory: Path) -> None:
        """Old and new weights are held together for a moment."""
        with Checkpoint(directory) as checkpoint:
            needed = checkpoint.bytes_as(self._dtype()) // (1 if self.device.type == "cpu" else self.group.size)
        free = available_bytes(self.device)
        if needed > free:
            raise ConfigError(
                f"no room for new weights beside the old: they take {needed >> 20} MiB, and {free >> 20} MiB are free;"
                " sleep(2), update_weights and wakeup need no room for both"
            )

    def close(self) -> None:
        """Frees the weights and the cache, and leaves the group."""
        self._profiling.close()
        self._graphs = self._model = self._attention = None
        self.group.close()

    def _limit(self) -> int:
        own, asked = self.config.max_position_embeddings, self.settings.max_seq_len
        most = most_positions(self.config.rope, own)
        if asked is not None and asked > most:
            raise ConfigError(f"max_seq_len {asked} is above the {most} positions that {self.config.name} has")
        return asked or own

    def _dtype(self) -> torch.dtype:
        name: str = self.settings.dtype
        if name == "auto":
            name = "float32" if self.device.type == "cpu" else self.config.torch_dtype
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype {name!r} of {self.config.name} is not known; set dtype to float32 or bfloat16")
        return dtype

    def _size(self, dtype: torch.dtype) -> None:
        itemsize = (self._kernels.kv_dtype or dtype).itemsize
        row = self.shard.heads.num_kv * self.config.head_dim * itemsize
        self._block_bytes = 2 * self.config.num_layers * self.settings.block_size * row
        self.num_blocks = self.settings.num_blocks or least(self.group, self._fitting_blocks(self._block_bytes))

    def _shape(self) -> AttentionShape:
        assert self._model is not None
        config, block_size = self.config, self.settings.block_size
        return AttentionShape(
            num_layers=config.num_layers,
            num_blocks=self.num_blocks,
            block_size=block_size,
            num_heads=self.shard.heads.num_queries,
            num_kv_heads=self.shard.heads.num_kv,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            windows=config.windows,
            dtype=self._model.dtype,
            device=self.device,
            max_rows=self.settings.max_num_seqs,
            max_pages=-(-self.max_seq_len // block_size),
        )

    def _allocate(self) -> None:
        try:
            self._attention = self._kernels.attention(self._shape())
        except (RuntimeError, OSError, MemoryError) as error:
            raise ConfigError(
                f"no room for the KV cache: {self.num_blocks} blocks take {self.num_blocks * self._block_bytes >> 20} MiB, and"
                f" {available_bytes(self.device) >> 20} MiB are free; set num_blocks lower, or leave it out"
            ) from error

    def _prepare_anew(self) -> None:
        """`_prepare` while the engine lives. With several ranks a failure is the death of the one that has it."""
        with meeting(self.group):
            self._prepare()

    @torch.inference_mode()
    def _prepare(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Where weights are to be read later there is nothing to prepare yet."""
        if self._model is not None and self._attention is not None:
            model, vocab_size = self._model, self.config.vocab_size
            try:
                self._graphs = self._kernels.prepare(
                    model.forward, self._attention, self._shape(), vocab_size, progress
                )
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"no room to prepare steps of {self.settings.max_num_seqs} sequences beside the KV cache; set memory_fraction"
                    " or max_num_seqs lower, or cuda_graphs to false"
                ) from error

    def _fitting_blocks(self, block_bytes: int) -> int:
        """As many blocks as the share of free memory holds, but no more than all sequences at full length need."""
        free = max(0, available_bytes(self.device) - self._kernels.reserved_bytes(len(set(self.config.windows))))
        if self.device.type == "cpu":
            share = free * (self.settings.memory_fraction or _HOST_FRACTION)
            if self.settings.memory_fraction is None:
                share = min(share, _HOST_MOST_BYTES)
            share /= self.group.size  # all are on this host
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


def _check_same(now: ModelConfig, new: ModelConfig, directory: Path) -> None:
    field = now.difference(new)
    if field is not None:
        raise ModelError(
            f"{directory} is another model: its {field} is {getattr(new, field)!r}, the running one's {getattr(now, field)!r}"
        )
