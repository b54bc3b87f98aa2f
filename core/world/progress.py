"""The step counter that rank 0 shares with the watcher: two 64-bit numbers in memory that both map."""

import mmap
import os
import tempfile

SIZE = 16


def create_shared() -> int:
    """A descriptor of memory for one `Progress`, without a name; inheritable only where it is passed on."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tllm-progress", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, SIZE)
    return fd


class Progress:
    """How many steps there were, and whether work is pending. Each number is written and read in one machine word."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._words = memoryview(self._map).cast("Q")

    def note(self, steps: int, busy: bool) -> None:
        words = self._words
        words[0] = steps
        words[1] = busy

    def read(self) -> tuple[int, bool]:
        return self._words[0], bool(self._words[1])

    def close(self) -> None:
        self._words.release()
        self._map.close()
