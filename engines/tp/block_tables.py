"""Gives sequences the blocks they need: found where the same tokens were computed before, shared among siblings, else new.

What is found ends before the first token whose row of logits is wanted: the last one's, or the first of the rows that
prompt logprobs still need. Where that is within a block, the rows before it are copied into a block of the sequence's own.
Only the last block of a sequence is ever written, and nobody shares it.

Where all layers see a sliding window only, blocks that the widest of them has left are given back, and need not be found. One
table serves all layers: a single layer that sees everything keeps every block.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tllm_core.contracts.messages import TokenLogprobs
from tllm_core.engines.tp.kv_cache import BlockPool
from tllm_core.engines.tp.kv_hashes import extend
from tllm_core.engines.tp.sequence import Sequence

_NEVER = 1 << 30
"""More blocks than any sequence has: `published` of one whose blocks hold keys and values of different weights."""


class _Prefix(NamedTuple):
    """What was found for a sequence: whole blocks, one more to copy from, and how many tokens stand before what is missing.

    unseen: how many blocks before these no layer needs any more. scores: the prompt logprobs that come with it, for as long as
    they are known from the sequence's first on.
    """

    unseen: int
    blocks: list[int]
    source: int | None
    tokens: int
    scores: list[TokenLogprobs]


_NOTHING = _Prefix(0, [], None, 0, [])


class BlockTables:
    """Changes `blocks`, `computed` and what else a sequence knows of the cache.

    window: how many tokens back any layer sees, its own included; None = all.
    copies: (from, to) of blocks whose content is needed elsewhere before the next step's first write; all are read before
    any is written. suspects: blocks that were given back with content that may be NaN; whoever runs the step clears
    them before it, since NaN spoils the next owner even where it is masked. queries, hits: tokens that were looked for
    in sequences which got blocks, and those found.
    """

    def __init__(self, pool: BlockPool, *, reuse: bool, window: int | None = None) -> None:
        self.pool = pool
        self.copies: list[tuple[int, int]] = []
        self.suspects: list[int] = []
        self.queries = self.hits = 0
        self._reuse, self._window = reuse, window

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Blocks for all of its tokens while `spare` more stay free; False where there are not so many."""
        pool, prefix = self.pool, self._find(sequence)
        have = prefix.unseen + len(prefix.blocks)
        need = pool.blocks_for(len(sequence.token_ids)) - have
        unowned = sum(not pool.references(block) for block in prefix.blocks)
        if need + unowned + spare > pool.free:
            return False
        pool.share(prefix.blocks)
        new = pool.take_many(need)
        if prefix.source is not None:
            self.copies.append((prefix.source, new[0]))
        sequence.blocks, sequence.unseen = [0] * prefix.unseen + prefix.blocks + new, prefix.unseen
        _fill_unseen(sequence)
        sequence.computed, sequence.published = prefix.tokens, have
        self._note_found(sequence, prefix)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """One more block, for its next token, once what no layer sees any more is given back; False where none is free."""
        self._slide(sequence)
        pool, source = self.pool, sequence.source
        if source is not None and pool.references(source) == 1 and (not pool.free or pool.content(source) is None):
            # The last sibling needs no copy, and may get none: its length fits in the pool, a copy besides may not.
            pool.withdraw([source])
            sequence.blocks.append(source)
        elif not pool.free:
            return False
        else:
            sequence.blocks += pool.take_many(1)
            if source is not None:
                self.copies.append((source, sequence.blocks[-1]))
                pool.give_back([source])
        _fill_unseen(sequence)
        sequence.source = None
        return True

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Gives a sequence of the same tokens all that its leader has or, once the step has run, will have computed."""
        full = leader.computed // self.pool.block_size
        sibling.blocks, sibling.unseen = leader.blocks[:full], leader.unseen
        sibling.source = leader.blocks[full] if leader.computed % self.pool.block_size else None
        self.pool.share(_owned(sibling))
        sibling.computed, sibling.published = leader.computed, max(full, leader.published)
        sibling.chain, sibling.admitted_at = leader.chain[:full], leader.admitted_at

    def release(self, sequence: Sequence, *, broken: bool = False) -> None:
        """Takes all of its blocks; others find what it has computed, unless that is `broken`."""
        if not broken:
            self.publish(sequence)
        # The end of a prefix is worth nothing without its beginning, and so is given up before it.
        freed = self.pool.give_back(reversed(_owned(sequence)))
        if broken:
            self.suspects += [block for block in freed if self.pool.content(block) is None]
        sequence.blocks, sequence.source, sequence.unseen, sequence.computed = [], None, 0, 0

    def publish(self, sequence: Sequence) -> None:
        """Lets others find its full blocks, all of which have been seen to be sound; gives up those that are there twice."""
        first, full = sequence.published, sequence.computed // self.pool.block_size
        if self._reuse and full > first:
            self._extend_chain(sequence, full)
            sequence.published = full
            self._publish(sequence, first, full)
            self._keep_scores(sequence, first, full)
        if sequence.computed >= sequence.prompt_len:
            sequence.prompt_logprobs = None

    def catch_up(self, sequence: Sequence) -> None:
        """Takes what others have computed of its prompt since it got its blocks."""
        pool, size, at = self.pool, self.pool.block_size, sequence.computed // self.pool.block_size
        if sequence.published != at or sequence.prompt_row is not None:
            return  # nothing is found, or shall be
        last = min(len(sequence.chain), (len(sequence.token_ids) - 1) // size)
        while at < last and (found := pool.find(sequence.chain[at])) is not None:
            self._swap(sequence, at, found)
            at += 1
            self._count_found(sequence, at * size - sequence.computed)
            sequence.computed = at * size
            sequence.published = at

    def forget(self, running: Iterable[Sequence]) -> int:
        """Nothing is found any more, and what is computed behind the blocks of `running` never will be. Returns how many
        blocks could be found."""
        for sequence in running:
            sequence.published = _NEVER
        return self.pool.forget_contents()

    # ------------------------------------------------------------------------------------------------- windows

    def _unseen(self, tokens: int) -> int:
        """How many blocks from the start no layer shows to the token behind `tokens` others."""
        return 0 if self._window is None else max(0, tokens + 1 - self._window) // self.pool.block_size

    def _slide(self, sequence: Sequence) -> None:
        unseen = self._unseen(sequence.computed)
        if unseen > sequence.unseen:
            self.pool.give_back(sequence.blocks[sequence.unseen : unseen])
            sequence.unseen = unseen

    # ------------------------------------------------------------------------------------------------- finding

    def _find(self, sequence: Sequence) -> _Prefix:
        if not self._reuse:
            return _NOTHING
        size, length = self.pool.block_size, len(sequence.token_ids)
        self._extend_chain(sequence, length // size)
        scores, row = self._find_scores(sequence)
        most = length - 1 if row is None else min(row, length - 1)
        unseen, blocks = self._longest(sequence.chain, most)
        tokens = min((unseen + len(blocks)) * size, most)
        whole = tokens // size - unseen
        source = blocks[whole] if tokens % size else None
        return _Prefix(unseen, blocks[:whole], source, tokens, scores)

    def _longest(self, chain: list[bytes], most: int) -> tuple[int, list[int]]:
        """Of the longest beginning of at most `most` tokens after which a sequence can go on: how many of its blocks are not
        needed for that, and the others."""
        size = self.pool.block_size
        end = min(len(chain), -(-most // size))
        while end:
            unseen, at, found = self._unseen(min(end * size, most)), end, list[int]()
            while at > unseen and (block := self.pool.find(chain[at - 1])) is not None:
                found.append(block)
                at -= 1
            if at == unseen:
                return unseen, found[::-1]
            end = at - 1
        return 0, []

    def _find_scores(self, sequence: Sequence) -> tuple[list[TokenLogprobs], int | None]:
        """Prompt logprobs behind those it has, and the first row that is wanted then."""
        known, row, size = sequence.prompt_logprobs, sequence.prompt_row, self.pool.block_size
        if known is None or row is None:
            return [], row
        top, have = sequence.sampling.prompt_logprobs or 0, len(known)
        scores: list[TokenLogprobs] = []
        for block in range(have // size, sequence.prompt_len // size):
            found = self.pool.scores.find(sequence.chain[block], top)
            if found is None:
                break
            scores += found[have + len(scores) - block * size :]
        reached = have + len(scores)
        return scores, reached - 1 if reached < sequence.prompt_len else None

    def _note_found(self, sequence: Sequence, prefix: _Prefix) -> None:
        if sequence.prompt_logprobs is not None and prefix.scores:
            sequence.prompt_logprobs += prefix.scores
            reached = len(sequence.prompt_logprobs)
            sequence.prompt_row = reached - 1 if reached < sequence.prompt_len else None
        if self._reuse:
            self.queries += len(sequence.token_ids)
            self._count_found(sequence, prefix.tokens)

    def _count_found(self, sequence: Sequence, tokens: int) -> None:
        self.hits += tokens
        if not sequence.preemptions:
            sequence.cached_tokens += tokens

    # ---------------------------------------------------------------------------------------------- publishing

    def _publish(self, sequence: Sequence, first: int, last: int) -> None:
        pool, begun = self.pool, first
        for at in range(first, last):
            block, content = sequence.blocks[at], sequence.chain[at]
            if pool.publish(block, content):
                continue
            self._announce(sequence, begun, at)
            begun = at + 1
            found = pool.find(content)
            if found is not None:
                self._swap(sequence, at, found)
        self._announce(sequence, begun, last)

    def _announce(self, sequence: Sequence, first: int, last: int) -> None:
        if first < last:
            self.pool.announce(sequence.blocks[first:last], sequence.chain[first - 1] if first else None)

    def _swap(self, sequence: Sequence, at: int, found: int) -> None:
        own = sequence.blocks[at]
        if found != own:
            self.pool.share([found])
            self.pool.give_back([own])
            sequence.blocks[at] = found
            _fill_unseen(sequence)

    def _keep_scores(self, sequence: Sequence, first: int, last: int) -> None:
        known, size = sequence.prompt_logprobs, self.pool.block_size
        if known is None:
            return
        top = sequence.sampling.prompt_logprobs or 0
        for at in range(first, min(last, len(known) // size)):
            # Published just now, by this sequence or another one.
            self.pool.scores.keep(sequence.chain[at], top, known[at * size : (at + 1) * size])

    def _extend_chain(self, sequence: Sequence, count: int) -> None:
        if len(sequence.chain) < count:
            extend(sequence.chain, sequence.chain_root, sequence.token_ids, self.pool.block_size, count)


def _owned(sequence: Sequence) -> list[int]:
    """All blocks that it has a reference to."""
    blocks = sequence.blocks[sequence.unseen :]
    return blocks if sequence.source is None else [*blocks, sequence.source]


def _fill_unseen(sequence: Sequence) -> None:
    """Kernels may read what they mask, which must be no other's: nothing there is NaN that it has not written itself."""
    if sequence.unseen:
        sequence.blocks[: sequence.unseen] = [sequence.blocks[sequence.unseen]] * sequence.unseen
