"""The step counter that rank 0 shares with the watcher: three 64-bit numbers in memory that both map."""

import mmap
import os
import tempfile

from tllm_core.world.descriptors import lifted

SIZE = 24
FOREVER_NS = 2**63
FOREVER_S = 2**32


def create_shared() -> int:
    """A descriptor of memory for one `Progress`, without a name; inheritable only where it is passed on."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tllm-progress", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, SIZE)
    return lifted(fd)


class Unread:
    """The progress of a rank that no watcher reads."""

    def note(self, steps: int, busy: bool) -> None:
        """How many steps there were, and whether work is pending."""

    def excuse(self, until: float) -> None:
        """Until then, in monotonic seconds, the world does what it was told to, however long that takes; 0 ends it early."""


UNREAD = Unread()


class Progress(Unread):
    """How many steps there were, whether work is pending, and until when standing still is excused.

    Each number is written and read in one machine word. Times are those of `time.monotonic()`, which is one clock for all
    processes of a host.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._words = memoryview(self._map).cast("Q")

    def note(self, steps: int, busy: bool) -> None:
        words = self._words
        words[0] = steps
        words[1] = busy

    def excuse(self, until: float) -> None:
        self._words[2] = max(0, int(until * 1e9)) if until < FOREVER_S else FOREVER_NS

    def read(self, now: float) -> tuple[int, bool]:
        """The steps, and whether work is pending that has no excuse at `now`."""
        return self._words[0], bool(self._words[1]) and self._words[2] <= now * 1e9

    def close(self) -> None:
        self._words.release()
        self._map.close()
