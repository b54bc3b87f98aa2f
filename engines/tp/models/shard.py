"""Which part of a model a rank computes. Ranks have equal shapes of heads and vocabulary; what is missing to that is zeros.

Query heads stay with their kv head. Where kv heads do not divide among ranks there are two ways out, and `heads_of` takes the
one with the smaller KV cache per rank, then the fewer query heads: some ranks get kv heads of zeros (9 query heads on 3 kv
heads over 2 ranks: 3 + 3 and 3 + 0), or a kv head is held by several ranks, each with some of its query heads.
"""

import math

from msgspec import Struct

from tllm_core.engines.tp.config import ModelConfig
from tllm_core.errors import ConfigError

_UNIT = 16
"""MLPs are cut at multiples of this where they can be: kernels like even sizes."""


class Heads(Struct, frozen=True):
    """The heads of one rank, of which all ranks have the same number.

    kv: the model's kv head at each place, None = zeros. queries: the query heads that go with it, at most `group` of
    them, which is what each place has room for.
    """

    group: int
    kv: tuple[int | None, ...]
    queries: tuple[range, ...]

    @property
    def num_kv(self) -> int:
        return len(self.kv)

    @property
    def num_queries(self) -> int:
        return len(self.kv) * self.group


class Shard(Struct, frozen=True):
    """inner: the MLP's columns of this rank. vocab: its rows of embedding and logits, of `vocab_rows` on each rank."""

    rank: int
    size: int
    heads: Heads
    inner: range
    vocab: range
    vocab_rows: int


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """Raises ConfigError where there are more ranks than there is work for."""
    if size > config.num_heads:
        raise ConfigError(
            f"tensor_parallel_size {size} is more than the {config.num_heads} heads that {config.name} has; set it lower"
        )
    rows = -(-config.vocab_size // size)
    first = min(rank * rows, config.vocab_size)
    return Shard(
        rank=rank,
        size=size,
        heads=heads_of(config.num_heads, config.num_kv_heads, rank, size),
        inner=_share(config.intermediate_size, rank, size),
        vocab=range(first, min(first + rows, config.vocab_size)),
        vocab_rows=rows,
    )


def heads_of(num_heads: int, num_kv_heads: int, rank: int, size: int) -> Heads:
    """`num_heads` is a multiple of `num_kv_heads`."""
    whole = num_heads // num_kv_heads

    def cost(splits: int) -> tuple[int, int]:
        places = -(-num_kv_heads * splits // size)
        return places, places * -(-whole // splits)

    splits = min(range(1, whole + 1), key=cost)
    places, group = cost(splits)[0], -(-whole // splits)
    kv: list[int | None] = []
    queries = []
    for place in range(rank * places, (rank + 1) * places):
        head, part = divmod(place, splits)
        real = head < num_kv_heads
        kv.append(head if real else None)
        first = min(part * group, whole) if real else 0
        last = min(first + group, whole) if real else 0
        queries.append(range(head * whole + first, head * whole + last))
    return Heads(group, tuple(kv), tuple(queries))


def _share(total: int, rank: int, size: int) -> range:
    unit = math.gcd(total, _UNIT)
    units = total // unit
    return range(units * rank // size * unit, units * (rank + 1) // size * unit)
