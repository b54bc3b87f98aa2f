"""Sums in the order of ranks, so that every rank that computes one has the same bits."""

from collections.abc import Sequence

import torch


def add_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Writes the sum of two or more `parts` to `out`, which may be none of them; types below 32 bits are rounded once."""
    first, second, *others = parts
    if not others:
        torch.add(first, second, out=out)
        return
    narrow = out.is_floating_point() and out.dtype.itemsize < 4
    total = first.float() if narrow else torch.add(first, second, out=out)
    for part in parts[1:] if narrow else others:
        total += part
    if narrow:
        out.copy_(total)
