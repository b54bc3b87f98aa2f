"""Who owns which block of the KV cache, and what can be found in it. Numbers only: the tensors are the runner's."""

from collections.abc import Iterable, Sequence

from tllm_core.engines.tp.free_list import FreeList
from tllm_core.engines.tp.kv_events import KvEventLog
from tllm_core.engines.tp.kv_hashes import number
from tllm_core.engines.tp.prompt_scores import PromptScores


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts.

    A block whose content was published is found by its hash, owned or not, until it is taken for something else: those that
    have nothing to be found go first, then what was not used for the longest time. Everything costs O(1) per block.
    scores: what is known of contents besides.
    """

    def __init__(self, num_blocks: int, block_size: int, events: KvEventLog | None = None) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._events = KvEventLog(0) if events is None else events
        self.scores = PromptScores()
        self._free = FreeList(num_blocks)
        self._references = [0] * num_blocks
        self._content: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}
        self._most_used = 0

    @property
    def free(self) -> int:
        """Blocks that nobody owns, also those whose content can be found."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def published(self) -> int:
        """Blocks whose content can be found, owned or not."""
        return len(self._found)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the whole pool."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A free block, owned once, and nobody finds what was in it. Raises IndexError where there is none."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """As `take`, `count` times or not at all."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks were asked for and {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        if blocks:
            self._most_used = max(self._most_used, max(blocks) + 1)
            self.withdraw(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner of each. Raises ValueError for one that is neither owned nor found by its content."""
        for block in blocks:
            if not self._references[block]:
                if self._content[block] is None:
                    raise ValueError(f"block {block} is free and can't be shared")
                self._free.remove(block)
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> list[int]:
        """One owner fewer of each; those without any are free again, and returned. Of what can be found, the first of
        `blocks` will be used for something else first."""
        freed = []
        for block in blocks:
            left = self._references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] = left
            if not left:
                freed.append(block)
                if self._content[block] is None:
                    # Used next: what was touched already, so that real memory grows no sooner than it must.
                    self._free.push_first(block)
                else:
                    self._free.push_last(block)
        return freed

    def references(self, block: int) -> int:
        """How many own it, 0 = free."""
        return self._references[block]

    # ------------------------------------------------------------------------------------------------ contents

    def find(self, content: bytes) -> int | None:
        """The block that holds it."""
        return self._found.get(content)

    def content(self, block: int) -> bytes | None:
        """By what it is found, None = it is not."""
        return self._content[block]

    def publish(self, block: int, content: bytes) -> bool:
        """From now on `block`, which is owned, is found by `content`; False where another one is already."""
        if self._found.setdefault(content, block) != block:
            return False
        self._content[block] = content
        return True

    def announce(self, blocks: Sequence[int], parent: bytes | None) -> None:
        """Tells of blocks that were published, one after the other behind `parent`."""
        hashes = tuple(number(content) for content in map(self.content, blocks) if content is not None)
        behind = None if parent is None else number(parent)
        self._events.stored(blocks, len(blocks) * self.block_size, hashes, behind)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """What is in these blocks, which are owned, is not found any more."""
        gone, hashes = [], []
        for block in blocks:
            content = self._content[block]
            if content is not None:
                del self._found[content]
                self._content[block] = None
                self.scores.drop(content)
                gone.append(block)
                hashes.append(number(content))
        if gone:
            self._events.removed(gone, hashes)

    def forget_contents(self) -> int:
        """Nothing is found any more; owners keep their blocks. Returns how many could be found."""
        owned = [block for block in self._found.values() if self._references[block]]
        count = len(self._found)
        self.withdraw(owned)
        for block in [block for block in self._free if self._content[block] is not None]:
            self._content[block] = None
            self._free.remove(block)
            self._free.push_first(block)
        self._found.clear()
        self.scores.clear()
        self._events.cleared()
        return count

    # -------------------------------------------------------------------------------------------------- memory

    def idle(self) -> list[int]:
        """Free blocks that somebody has used before."""
        return [block for block in range(self._most_used) if not self._references[block]]

    def forget(self) -> None:
        """No block was ever used: their memory is new. Raises ValueError where one is owned."""
        if self.used:
            raise ValueError(f"{self.used} blocks are in use")
        if self._found:
            self.forget_contents()
        self._free = FreeList(self.num_blocks)
        self._most_used = 0
