"""Log-probabilities under the raw logits: before penalties, temperature and filters."""

from collections.abc import Sequence

import torch

from tllm_core.contracts.messages import Logprob, TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """For each row the token's own entry, then its `tops[row]` best; None where the row's logits are broken.

    logits: [rows, vocab]. token_ids: int64 [rows]. tops: [rows], 0 = the token's own entry alone.
    """
    scores = torch.log_softmax(logits, dim=-1)
    column = token_ids.unsqueeze(1)
    own = scores.gather(1, column).squeeze(1).tolist()
    ranks = (logits > logits.gather(1, column)).sum(dim=-1).tolist()
    best = scores.topk(max(tops), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        _position(token, own[row], ranks[row] + 1, values[row][: tops[row]], ids[row])
        for row, token in enumerate(token_ids.tolist())
    ]


def _position(token_id: int, own: float, rank: int, values: list[float], ids: list[int]) -> TokenLogprobs | None:
    # One NaN or +inf among a row's logits makes its whole log_softmax NaN.
    if own != own:
        return None
    entries = [Logprob(token_id, own, rank)]
    rank_here = 0
    for place, value in enumerate(values, 1):
        if place == 1 or value < values[place - 2]:
            rank_here = place
        entries.append(Logprob(ids[place - 1], value, rank_here))
    return entries
