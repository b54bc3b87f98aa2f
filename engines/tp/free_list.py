"""Which blocks nobody owns, in the order in which they will be used; every change takes constant time."""

from collections.abc import Iterator


class FreeList:
    """The numbers below `size`, each in the list or not; all of them at first, in rising order.

    A doubly linked list in two lists of numbers, which takes any member out without a search. `size` is the place before
    the first and after the last member.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._after: list[int] = [*range(1, size + 1), 0]
        self._before: list[int] = [size, *range(size)]
        self._count = size

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """From the one that is used next to the one that is used last."""
        at = self._after[self._size]
        while at != self._size:
            yield at
            at = self._after[at]

    def pop(self) -> int:
        """Takes the first out. Raises IndexError where there is none."""
        first = self._after[self._size]
        if first == self._size:
            raise IndexError("no block is free")
        self.remove(first)
        return first

    def remove(self, number: int) -> None:
        """Takes a member out; `number` must be one."""
        before, after = self._before[number], self._after[number]
        self._after[before], self._before[after] = after, before
        self._count -= 1

    def push_first(self, number: int) -> None:
        """Puts it before all others; `number` must not be a member."""
        self._insert(self._size, number, self._after[self._size])

    def push_last(self, number: int) -> None:
        """Puts it after all others; `number` must not be a member."""
        self._insert(self._before[self._size], number, self._size)

    def _insert(self, before: int, number: int, after: int) -> None:
        self._before[number], self._after[number] = before, after
        self._after[before] = self._before[after] = number
        self._count += 1
