"""One step's batch as the index tensors that attention kernels share; built on the CPU without a loop over tokens."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile

import torch

from tllm_core.engines.tp.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """All tensors are int32 on the CPU; sequences are in the batch's order, those with one token first.

    qo_indptr: [sequences + 1] where each sequence's tokens start in the flat batch. seq_lens: [sequences] context plus query.
    kv_indptr: [sequences + 1] where each sequence's pages start in kv_indices: [pages]. last_page_len: [sequences] rows
    used in the last page, 1 to block_size. batch_indices, positions: [tokens] each token's sequence, and its place in it.
    slot_mapping: [tokens] the cache row it is stored at, block * block_size + row. num_decodes: sequences of one token
    at the front.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    num_decodes: int

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @classmethod
    def of(cls, batch: ScheduledBatch, block_size: int) -> "AttentionMetadata":
        """Raises ValueError where a block table does not cover its sequence."""
        query_lens, context_lens = _int32(batch.query_lens), _int32(batch.context_lens)
        seq_lens = context_lens + query_lens
        pages = (seq_lens + block_size - 1) // block_size
        page_counts = pages.tolist()
        _check(batch, page_counts)
        qo_indptr, kv_indptr = _starts(query_lens), _starts(pages)
        kv_indices = _int32(
            chain.from_iterable(islice(table, n) for table, n in zip(batch.block_tables, page_counts, strict=True))
        )
        sequences = torch.arange(len(batch.query_lens), dtype=torch.int32)
        batch_indices = sequences.repeat_interleave(query_lens)
        offsets = context_lens - qo_indptr[:-1]
        positions = torch.arange(len(batch.token_ids), dtype=torch.int32) + offsets.index_select(0, batch_indices)
        blocks = kv_indices.index_select(0, kv_indptr.index_select(0, batch_indices) + positions // block_size)
        return cls(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=seq_lens - (pages - 1) * block_size,
            seq_lens=seq_lens,
            batch_indices=batch_indices,
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            block_size=block_size,
            num_decodes=sum(1 for _ in takewhile(lambda length: length == 1, batch.query_lens)),
        )

    def padded(self, num_sequences: int, page: int) -> "AttentionMetadata":
        """As many sequences as a captured graph has, for a batch that only decodes: each added one is a token alone in `page`.

        Raises ValueError where the batch has a prompt, or more sequences than that.
        """
        extra = num_sequences - self.num_sequences
        if extra < 0 or self.num_decodes != self.num_sequences:
            raise ValueError(
                f"{self.num_sequences} sequences, {self.num_decodes} of which decode, are no part of {num_sequences}"
            )
        ones = torch.ones(extra, dtype=torch.int32)
        zeros = torch.zeros(extra, dtype=torch.int32)
        everyone = torch.arange(num_sequences + 1, dtype=torch.int32)
        return replace(
            self,
            qo_indptr=everyone,
            kv_indptr=torch.cat((self.kv_indptr, self.kv_indptr[-1] + everyone[1 : extra + 1])),
            kv_indices=torch.cat((self.kv_indices, torch.full((extra,), page, dtype=torch.int32))),
            last_page_len=torch.cat((self.last_page_len, ones)),
            seq_lens=torch.cat((self.seq_lens, ones)),
            batch_indices=everyone[:-1],
            positions=torch.cat((self.positions, zeros)),
            slot_mapping=torch.cat(
                (self.slot_mapping, torch.full((extra,), page * self.block_size, dtype=torch.int32))
            ),
            num_decodes=num_sequences,
        )

    def unrolled(self) -> "AttentionMetadata":
        """Every token as a sequence of its own, that ends with it: the same attention, computed in the same way for all."""
        seq_lens = self.positions + 1
        counts = (self.positions // self.block_size + 1).long()
        kv_indptr = _starts(counts)
        first = self.kv_indptr.index_select(0, self.batch_indices)
        # Within each token's pages they count from its sequence's first page on.
        pages = torch.arange(int(kv_indptr[-1]), dtype=torch.int32)
        pages += (first - kv_indptr[:-1]).repeat_interleave(counts)
        everyone = torch.arange(self.num_tokens + 1, dtype=torch.int32)
        return replace(
            self,
            qo_indptr=everyone,
            kv_indptr=kv_indptr,
            kv_indices=self.kv_indices.index_select(0, pages),
            last_page_len=self.positions % self.block_size + 1,
            seq_lens=seq_lens,
            batch_indices=everyone[:-1],
            num_decodes=self.num_tokens,
        )


def _int32(values: Iterable[int]) -> torch.Tensor:
    numbers = array("i", values)
    return torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.empty(0, dtype=torch.int32)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))


def _check(batch: ScheduledBatch, page_counts: list[int]) -> None:
    if sum(batch.query_lens) != len(batch.token_ids):
        raise ValueError(f"query_lens add up to {sum(batch.query_lens)} of {len(batch.token_ids)} tokens")
    if any(len(table) < pages for table, pages in zip(batch.block_tables, page_counts, strict=True)):
        raise ValueError("a block table does not cover its sequence")
