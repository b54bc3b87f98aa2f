"""What the kernels compute, by its definition, in float32, a sequence at a time."""

from itertools import pairwise

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32; weight: float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; the first table.shape[1] of a head are turned, its halves against each other."""
    size = table.shape[1]
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    first, second = x[..., :size].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., size:]), dim=-1)


def append(
    cache: torch.Tensor, new: torch.Tensor, rows: list[int], positions: list[int], tables: list[list[int]]
) -> None:
    """cache: [pages, page_size, heads, head_dim]; token i is that of sequence rows[i] at positions[i]."""
    size = cache.shape[1]
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        cache[tables[row][position // size], position % size] = new[i]


def gathered(cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """[length, heads, head_dim] float32."""
    return cache[table].float().flatten(0, 1)[:length]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window_left: int) -> torch.Tensor:
    """One sequence: the last q.shape[0] of its k.shape[0] tokens ask; float32 [tokens, heads, head_dim]."""
    tokens, heads, _ = q.shape
    k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    own = torch.arange(k.shape[0] - tokens, k.shape[0]).unsqueeze(1)
    places = torch.arange(k.shape[0])
    unseen = places > own
    if window_left >= 0:
        unseen = unseen | (places < own - window_left)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v)


def tables(indptr: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """Each sequence's pages."""
    starts, pages = indptr.tolist(), indices.tolist()
    return [pages[a:b] for a, b in pairwise(starts)]
