"""Decoding steps recorded once per batch size and replayed: a GPU then waits for no Python between two kernels.

A batch is filled up to the next recorded size with sequences of one token, which write into a block that nobody owns.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch

from tllm_core.engines.tp.attention import AttentionMetadata, AttentionShape, CapturableAttention
from tllm_core.engines.tp.batch import ScheduledBatch

MOST_ROWS = 512
"""Beyond it a step's time is the kernels' own, and a graph saves nothing."""


_NOBODY = ScheduledBatch(token_ids=array("i"), query_lens=[], context_lens=[], block_tables=[], logits_rows=[])


class Forward(Protocol):
    """A model: (token_ids, positions, logits_rows, attention) -> logits, None where another rank has them."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor | None,
        attention: CapturableAttention,
        /,
    ) -> torch.Tensor | None: ...


class Recorder(Protocol):
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it, records what it does to memory, and returns what does that again."""


class CudaRecorder:
    """torch's CUDA graphs. All share one pool of memory, since they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            # What libraries do the first time, like compiling and allocating, can't be recorded.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                run()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        return graph.replay


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are recorded: close together where batches are small, and never more than an eighth apart."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_ROWS + 1, 32)]
    most = min(max_rows, MOST_ROWS)
    return [*(size for size in sizes if size < most), most]


def warm_up(forward: Forward, attention: CapturableAttention, shape: AttentionShape) -> None:
    """One step with a prompt and one that decodes, in the block that nobody owns: compiles and allocates what steps need."""
    length = shape.block_size + 1
    table = [attention.spare_block] * 2
    batch = ScheduledBatch(
        token_ids=array("i", [0] * (1 + length)),
        query_lens=[1, length],
        context_lens=[0, 0],
        block_tables=[table, table],
        logits_rows=[0],
    )
    metadata = AttentionMetadata.of(batch, shape.block_size)
    attention.plan(metadata)
    tokens = torch.zeros(metadata.num_tokens, dtype=torch.int32, device=shape.device)
    rows = torch.zeros(1, dtype=torch.int32, device=shape.device)
    forward(tokens, metadata.positions.to(shape.device), rows, attention)


class DecodeGraphs:
    """For one model and one cache: whoever changes either makes new ones."""

    def __init__(
        self,
        forward: Forward,
        attention: CapturableAttention,
        recorder: Recorder,
        shape: AttentionShape,
        vocab_size: int,
    ) -> None:
        self.sizes = graph_sizes(shape.max_rows)
        self._forward, self._attention, self._recorder = forward, attention, recorder
        rows, device = self.sizes[-1], shape.device
        self._token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        # Outside of the graphs' memory, which the next one is recorded into.
        self._logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self._idle = AttentionMetadata.of(_NOBODY, shape.block_size)
        self._replays: dict[int, Callable[[], None]] = {}
        self._has_logits = True

    def take(self, batch: ScheduledBatch, metadata: AttentionMetadata) -> bool:
        """Whether this batch is one of theirs: it only decodes, all logits are wanted, and it is not too large."""
        rows = metadata.num_sequences
        whole = metadata.num_decodes == rows == len(batch.logits_rows)
        return whole and rows <= self.sizes[-1]

    def capture(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Records all sizes; else each is when it first comes. The largest first, whose memory the others fit into."""
        for done, size in enumerate(reversed(self.sizes), 1):
            self._replay(size)
            progress(done / len(self.sizes))

    def run(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor | None:
        """float32 logits [sequences, vocab], valid until the next call; None where another rank has them.

        token_ids: int32 [sequences] on the CPU.
        """
        rows = metadata.num_sequences
        size = self.sizes[bisect_left(self.sizes, rows)]
        replay = self._replay(size)
        padded = metadata.padded(size, self._attention.spare_block)
        self._attention.plan_captured(padded)
        self._token_ids[:rows].copy_(token_ids)
        self._positions[:size].copy_(padded.positions)
        replay()
        return self._logits[:rows] if self._has_logits else None

    def _replay(self, size: int) -> Callable[[], None]:
        if size not in self._replays:
            padded = self._idle.padded(size, self._attention.spare_block)
            self._attention.plan_captured(padded)
            self._positions[:size].copy_(padded.positions)
            self._replays[size] = self._recorder.record(lambda: self._step(size))
        return self._replays[size]

    def _step(self, size: int) -> None:
        logits = self._forward(self._token_ids[:size], self._positions[:size], None, self._attention)
        self._has_logits = logits is not None
        if logits is not None:
            self._logits[:size].copy_(logits)
