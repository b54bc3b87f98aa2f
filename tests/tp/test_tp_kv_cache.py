"""The block pool: every block is owned or free, and no count is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tllm_core.engines.tp.kv_cache import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share and give back; a plain table of owners is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        free = self.pool.free
        if count > free:
            with pytest.raises(IndexError, match=f"{count} blocks were asked for and {free} are free"):
                self.pool.take_many(count)
        else:
            self.owners.append(self.pool.take_many(count))

    @rule(pick=st.randoms(use_true_random=False))
    def share(self, pick) -> None:
        if self.owners:
            blocks = list(pick.choice(self.owners))
            self.pool.share(blocks)
            self.owners.append(blocks)

    @rule(pick=st.randoms(use_true_random=False))
    def give_back(self, pick) -> None:
        if self.owners:
            self.pool.give_back(self.owners.pop(pick.randrange(len(self.owners))))

    @invariant()
    def counts_are_those_of_the_owners(self) -> None:
        owned = [block for blocks in self.owners for block in blocks]
        for block in range(12):
            assert self.pool.references(block) == owned.count(block)
        assert self.pool.used == len(set(owned))
        assert self.pool.free + self.pool.used == 12

    def teardown(self) -> None:
        for blocks in self.owners:
            self.pool.give_back(blocks)
        assert self.pool.free == 12
        assert sorted(self.pool.take_many(12)) == list(range(12))


TestPool = PoolMachine.TestCase


@settings(deadline=None)
@given(tokens=st.integers(0, 1000), size=st.integers(1, 64))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(tokens: int, size: int) -> None:
    pool = BlockPool(4, size)
    blocks = pool.blocks_for(tokens)
    assert (blocks - 1) * size < tokens <= blocks * size
    assert pool.capacity == 4 * size


def test_a_block_is_not_given_back_twice() -> None:
    pool = BlockPool(2, 16)
    block = pool.take()
    pool.give_back([block])
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.give_back([block])


def test_a_free_block_is_not_shared() -> None:
    with pytest.raises(ValueError, match="block 1 is free"):
        BlockPool(2, 16).share([1])


def test_what_was_used_last_is_used_next_so_that_little_memory_is_touched() -> None:
    pool = BlockPool(1000, 16)
    touched = set()
    for _ in range(50):
        blocks = pool.take_many(3)
        touched.update(blocks)
        pool.give_back(blocks)
    assert len(touched) == 3
