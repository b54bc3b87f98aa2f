"""What ranks have to agree on, said through any group. With one rank there is nothing to say."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tllm_core.engines.tp.comm import Group
from tllm_core.errors import ConfigError, ControlError, ModelError

REFUSALS = (ConfigError, ModelError, ControlError)
"""What all ranks raise where one does, see `together`; they still agree on what comes next."""

_TEXT_BYTES = 2048


def least(group: Group, number: int) -> int:
    """The smallest of all ranks' numbers, each below 2^31."""
    if group.size == 1:
        return number
    numbers = group.gather(torch.tensor([[number]], dtype=torch.int64))
    return group.broadcast(None if numbers is None else array("i", [int(numbers.min())]))[0]


def texts(group: Group, text: str) -> list[str]:
    """On rank 0 what each rank says, cut at 2 KiB; on others [] ."""
    if group.size == 1:
        return [text]
    row = torch.zeros(1, _TEXT_BYTES, dtype=torch.uint8)
    said = bytearray(text.encode()[:_TEXT_BYTES])
    if said:
        row[0, : len(said)] = torch.frombuffer(said, dtype=torch.uint8)
    rows = group.gather(row)
    if rows is None:
        return []
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows.view(group.size, _TEXT_BYTES)]


@contextmanager
def together(group: Group) -> Iterator[None]:
    """Ends only when all ranks have done what is inside, in which they must not meet. Where one of REFUSALS ended it on any, it
    raises on all of them: their own, or one that names the first rank that had one. Anything else is that rank's death."""
    own: Exception | None = None
    try:
        yield
    except REFUSALS as error:
        own = error
    if group.size > 1:
        failed = next(((rank, text) for rank, text in enumerate(texts(group, _words(own))) if text), None)
        words = "" if failed is None else f"engine rank {failed[0]}: {failed[1]}"
        verdict = group.broadcast(array("i", list(words.encode())) if group.rank == 0 else None)
        if own is None and verdict:
            own = ConfigError(bytes(verdict.tolist()).decode(errors="ignore"))
    if own is not None:
        raise own


@contextmanager
def meeting(group: Group) -> Iterator[None]:
    """For what ranks compute together: a rank that fails leaves the others waiting for it, and nothing can be agreed on. With
    several, one of REFUSALS is raised as a RuntimeError with its words: that rank's death, as in any step."""
    try:
        yield
    except REFUSALS as error:
        if group.size == 1:
            raise
        raise RuntimeError(_words(error)) from error


def _words(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__
