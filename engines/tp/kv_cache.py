"""Who owns which block of the KV cache. Numbers only: the tensors are the runner's."""

from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts. Taking and giving back cost O(1) per block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        # A stack: what was used last is used next, so that a pool which is never full stays small in real memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._most_used = 0

    @property
    def touched(self) -> int:
        """Blocks from this number on were never taken."""
        return self._most_used

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the whole pool."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A free block, owned once. Raises IndexError where there is none; ask `free` first."""
        block = self._free.pop()
        self._references[block] = 1
        if block >= self._most_used:
            self._most_used = block + 1
        return block

    def take_many(self, count: int) -> list[int]:
        """As `take`, `count` times or not at all."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks were asked for and {len(self._free)} are free")
        return [self.take() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner of each; they must be in use."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is free and can't be shared")
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> list[int]:
        """One owner fewer of each; those without any are free again, and returned."""
        freed = []
        for block in blocks:
            left = self._references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] = left
            if not left:
                self._free.append(block)
                freed.append(block)
        return freed

    def idle(self) -> list[int]:
        """Free blocks that somebody has used before."""
        return [block for block in range(self._most_used) if not self._references[block]]

    def forget(self) -> None:
        """No block was ever used: their memory is new. Raises ValueError where one is owned."""
        if self.used:
            raise ValueError(f"{self.used} blocks are in use")
        self._most_used = 0
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def references(self, block: int) -> int:
        """How many own it, 0 = free."""
        return self._references[block]
