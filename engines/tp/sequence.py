"""One sequence of one request while the engine owes something for it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tllm_core.contracts.messages import SamplingParams, TokenIds, TokenLogprobs
from tllm_core.engines.tp.kv_hashes import root

if TYPE_CHECKING:
    from tllm_core.engines.tp.rules import Rules

Order = tuple[int, int, int]
"""(priority, arrival, index): what is smaller is more important."""

UNSALTED = root()


class Sequence:
    """Tokens, progress and parameters of one sequence; compared by identity.

    token_ids: prompt, then what was generated. computed: how many of them have their keys and values in the cache, or
    will have once the step that is scheduled has run. blocks: of the cache, in order; in place of the first `unseen`, which no
    layer sees any more and which are not its own, stands another of its own. max_len: of `token_ids` at most.
    min_len: below it nothing in `stop_ids` may come or end the sequence. seed, index: key of its random numbers.
    rules: which tokens it may have, None = all as they come.
    prompt_row: the first prompt token whose row of logits is still wanted, for prompt logprobs; None = none is.

    Of the cache's: chain: hashes of the full blocks of `token_ids`, as far as they were needed, behind `chain_root`.
    published: how many blocks from the start can be found by others, or never shall. source: a block of a sibling's, of
    which the rows that are computed go into the next new block. cached_tokens: of the prompt, found and not computed.
    siblings: sequences that begin once this one's prompt is computed, with the same blocks.
    """

    __slots__ = (
        "admitted_at",
        "blocks",
        "cached_tokens",
        "chain",
        "chain_root",
        "computed",
        "index",
        "max_len",
        "min_len",
        "order",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "prompt_row",
        "published",
        "request_id",
        "rules",
        "sampling",
        "seed",
        "siblings",
        "source",
        "stop_ids",
        "token_ids",
        "unseen",
    )

    def __init__(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        order: Order,
        max_len: int,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        request_id: int = 0,
        rules: Rules | None = None,
        chain_root: bytes = UNSALTED,
    ) -> None:
        self.token_ids = array("i", prompt.view.tobytes())
        self.prompt_len = len(self.token_ids)
        self.computed = 0
        self.blocks: list[int] = []
        self.unseen = 0
        self.order, self.index = order, order[2]
        self.max_len, self.min_len = max_len, self.prompt_len + sampling.min_tokens
        self.sampling, self.seed, self.stop_ids = sampling, seed, stop_ids
        self.request_id, self.rules = request_id, rules
        # They come once per request, with its first sequence.
        self.prompt_row = 0 if sampling.prompt_logprobs is not None and self.index == 0 else None
        self.prompt_logprobs: list[TokenLogprobs] | None = None if self.prompt_row is None else [()]
        self.admitted_at: float | None = None
        self.preemptions = 0
        self.chain: list[bytes] = []
        self.chain_root = chain_root
        self.published = self.cached_tokens = 0
        self.source: int | None = None
        self.siblings: list[Sequence] = []

    @property
    def owed(self) -> int:
        """Tokens that are not in the cache yet: 1 where it decodes."""
        return len(self.token_ids) - self.computed

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id}:{self.order} {self.computed}/{len(self.token_ids)} in {self.blocks}>"


def importance(sequence: Sequence) -> Order:
    """Sort key: the most important first."""
    return sequence.order
