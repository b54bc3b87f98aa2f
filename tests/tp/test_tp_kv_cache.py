"""The block pool: every block is owned or free, no count is lost, and what is found is what was published."""

import hashlib
import time
from array import array
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tllm_core.contracts.messages import KvEvent, Logprob
from tllm_core.engines.tp.free_list import FreeList
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.kv_events import KvEventLog
from tllm_core.engines.tp.kv_hashes import extend, number, root
from tllm_core.engines.tp.prompt_scores import PromptScores

BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, publish and give back; a table of owners, one of contents and the order of use are the model."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KvEventLog(10_000)
        self.pool = BlockPool(BLOCKS, 4, self.log)
        self.owners: list[list[int]] = []
        self.plain = list(range(BLOCKS))
        self.kept: OrderedDict[int, bytes] = OrderedDict()
        self.contents: dict[bytes, int] = {}

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        free = self.pool.free
        if count > free:
            with pytest.raises(IndexError, match=f"{count} blocks were asked for and {free} are free"):
                self.pool.take_many(count)
            return
        blocks = self.pool.take_many(count)
        self.owners.append(blocks)
        expected = [self.plain.pop(0) if self.plain else self.evict() for _ in range(count)]
        assert blocks == expected, "content is given up only where nothing else is free, the least used first"

    def evict(self) -> int:
        block, content = self.kept.popitem(last=False)
        del self.contents[content]
        return block

    @rule(pick=st.randoms(use_true_random=False))
    def share(self, pick) -> None:
        if self.owners:
            blocks = list(pick.choice(self.owners))
            self.pool.share(blocks)
            self.owners.append(blocks)

    @rule(content=st.integers(0, 20).map(lambda at: b"%16d" % at))
    def find(self, content: bytes) -> None:
        block = self.pool.find(content)
        assert block == self.contents.get(content)
        if block is not None:
            self.pool.share([block])
            self.owners.append([block])
            self.kept.pop(block, None)

    @rule(pick=st.randoms(use_true_random=False), content=st.integers(0, 20).map(lambda at: b"%16d" % at))
    def publish(self, pick, content: bytes) -> None:
        plain = [block for blocks in self.owners for block in blocks if self.pool.content(block) is None]
        if plain:
            block = pick.choice(plain)
            assert self.pool.publish(block, content) == (content not in self.contents)
            self.contents.setdefault(content, block)

    @rule(pick=st.randoms(use_true_random=False))
    def give_back(self, pick) -> None:
        if self.owners:
            blocks = self.owners.pop(pick.randrange(len(self.owners)))
            freed = self.pool.give_back(blocks)
            left = [block for others in self.owners for block in others]
            assert freed == [block for block in blocks if block not in left]
            for block in freed:
                content = next((c for c, b in self.contents.items() if b == block), None)
                if content is None:
                    self.plain.insert(0, block)
                else:
                    self.kept[block] = content

    @rule()
    def forget(self) -> None:
        assert self.pool.forget_contents() == len(self.contents)
        self.plain[:0] = list(self.kept)[::-1]
        self.kept.clear()
        self.contents.clear()

    @invariant()
    def counts_are_those_of_the_owners(self) -> None:
        owned = [block for blocks in self.owners for block in blocks]
        for block in range(BLOCKS):
            assert self.pool.references(block) == owned.count(block)
        assert self.pool.used == len(set(owned))
        assert self.pool.free + self.pool.used == BLOCKS
        assert list(self.pool._free) == [*self.plain, *self.kept]
        assert self.pool.published == len(self.contents)

    def teardown(self) -> None:
        for blocks in self.owners:
            self.pool.give_back(blocks)
        assert self.pool.free == BLOCKS
        assert sorted(self.pool.take_many(BLOCKS)) == list(range(BLOCKS))
        assert self.pool.published == 0


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


def test_events_tell_what_is_found_what_no_more_and_that_all_is_gone() -> None:
    log = KvEventLog(100)
    pool = BlockPool(3, 4, log)
    chain: list[bytes] = []
    extend(chain, root(), array("i", range(12)), 4, 3)
    blocks = pool.take_many(3)
    for block, content in zip(blocks, chain, strict=True):
        assert pool.publish(block, content)
    pool.announce(blocks[:1], None)
    pool.announce(blocks[1:], chain[0])
    pool.give_back(blocks[::-1])
    assert pool.take() == blocks[2]
    pool.forget_contents()
    hashes = [number(content) for content in chain]
    assert log.since(0).events == (
        KvEvent("stored", (0,), 4, (hashes[0],), None),
        KvEvent("stored", (1, 2), 8, (hashes[1], hashes[2]), hashes[0]),
        KvEvent("removed", (2,), 0, (hashes[2],)),
        KvEvent("cleared"),
    )


def test_what_is_known_of_a_content_goes_with_it() -> None:
    pool = BlockPool(2, 4)
    for content in (b"x" * 16, b"y" * 16):
        block = pool.take()
        pool.publish(block, content)
        pool.scores.keep(content, 0, scores(4, 0))
        pool.give_back([block])
    assert pool.scores.size == 8
    pool.take()
    assert pool.scores.find(b"x" * 16, 0) is None
    assert pool.scores.find(b"y" * 16, 0) is not None
    pool.forget_contents()
    assert pool.scores.size == 0


def test_what_is_owned_while_all_is_forgotten_is_told_as_removed() -> None:
    log = KvEventLog(100)
    pool = BlockPool(3, 4, log)
    (block,) = pool.take_many(1)
    pool.publish(block, b"x" * 16)
    pool.forget_contents()
    assert [event.kind for event in log.since(0).events] == ["removed", "cleared"]
    assert pool.references(block) == 1
    assert pool.find(b"x" * 16) is None


# ----------------------------------------------------------------------------------------------------- free list


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "first", "last"]), st.integers(0, 7))))
def test_a_free_list_is_a_list_with_a_cheap_middle(moves: list[tuple[str, int]]) -> None:
    found, model = FreeList(8), list(range(8))
    for move, block in moves:
        if move == "pop" and model:
            assert found.pop() == model.pop(0)
        elif move == "pop":
            with pytest.raises(IndexError, match="no block is free"):
                found.pop()
        elif move == "remove" and block in model:
            found.remove(block)
            model.remove(block)
        elif move == "first" and block not in model:
            found.push_first(block)
            model.insert(0, block)
        elif move == "last" and block not in model:
            found.push_last(block)
            model.append(block)
        assert (list(found), len(found)) == (model, len(model))


def test_finding_and_freeing_cost_the_same_in_a_large_pool_as_in_a_small_one() -> None:
    def cost_s(blocks: int) -> float:
        pool = BlockPool(blocks, 16)
        taken = pool.take_many(blocks)
        for block in taken:
            pool.publish(block, b"%16d" % block)
        pool.give_back(taken)
        middle, best = [b"%16d" % (blocks // 2 + at) for at in range(50)], float("inf")
        for _ in range(20):
            began = time.process_time()
            found = [block for content in middle if (block := pool.find(content)) is not None]
            pool.share(found)
            pool.give_back(found)
            best = min(best, time.process_time() - began)
        assert len(found) == 50
        return best

    # A search through the list would cost a thousand times as much.
    assert cost_s(100_000) < 30 * cost_s(100)


# --------------------------------------------------------------------------------------------------------- hashes


def test_hashes_are_those_of_the_documentation_on_every_machine() -> None:
    chain: list[bytes] = []
    extend(chain, root("ä", "lora"), array("i", [1, 2, 3, -1]), 2, 2)
    begin = hashlib.blake2b("4:lora2:ä".encode(), digest_size=16, person=b"tllm-kv-root").digest()
    first = hashlib.blake2b(begin + bytes([1, 0, 0, 0, 2, 0, 0, 0]), digest_size=16, person=b"tllm-kv-block").digest()
    second = hashlib.blake2b(first + b"\3\0\0\0\xff\xff\xff\xff", digest_size=16, person=b"tllm-kv-block").digest()
    assert chain == [first, second]
    assert number(first) == int.from_bytes(first[:8], "little") < 2**64
    assert root().hex() == "bdd595006335469e7c8e55ec6ece1427"


def test_a_chain_goes_on_where_it_ended() -> None:
    tokens = array("i", range(100))
    whole: list[bytes] = []
    extend(whole, root(), tokens, 8, 12)
    piecewise: list[bytes] = []
    for count in (1, 1, 5, 12):
        extend(piecewise, root(), tokens, 8, count)
    assert piecewise == whole
    assert len(set(whole)) == 12


def test_salts_and_adapters_begin_chains_of_their_own() -> None:
    names = [None, "", "a", "b", "1:a", "-", "\ud800"]
    roots = [root(salt, adapter) for salt in names for adapter in names]
    assert len(set(roots)) == len(roots)


# ---------------------------------------------------------------------------------------------------- prompt scores


def scores(tokens: int, top: int) -> list[list[Logprob]]:
    return [[Logprob(at, -float(rank), rank) for rank in range(top + 1)] for at in range(tokens)]


def test_scores_are_found_for_as_many_candidates_as_were_kept_or_fewer() -> None:
    kept = PromptScores()
    kept.keep(b"x", 3, scores(4, 3))
    assert kept.find(b"x", 3) == scores(4, 3)
    assert kept.find(b"x", 1) == scores(4, 1)
    assert kept.find(b"x", 4) is None
    assert kept.find(b"y", 0) is None
    kept.keep(b"x", 1, scores(4, 1))
    assert kept.find(b"x", 3) == scores(4, 3), "more is known than was offered"
    kept.keep(b"x", 5, scores(4, 5))
    assert kept.find(b"x", 5) == scores(4, 5)
    assert kept.size == 4 * 6


def test_scores_are_bounded_and_those_not_used_longest_go_first() -> None:
    kept = PromptScores(most=24)
    for name in (b"a", b"b", b"c"):
        kept.keep(name, 1, scores(4, 1))
    assert kept.find(b"a", 1) is not None
    kept.keep(b"d", 1, scores(4, 1))
    assert kept.find(b"b", 1) is None
    assert kept.find(b"a", 1) is not None
    assert kept.size == 24
    kept.drop(b"d")
    kept.drop(b"d")
    assert (kept.size, kept.find(b"d", 1)) == (16, None)
    kept.clear()
    assert (kept.size, kept.find(b"a", 1)) == (0, None)
