"""Which tokens the echo engine answers with: a function of the prompt and the sequence's index alone."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count, islice
from zlib import crc32

from tllm_core.contracts.messages import Logprob, TokenIds, TokenLogprobs

STRIDE = 7919
INDEX_STRIDE = 104729
BLOCK = 32


@lru_cache(maxsize=4096)
def _block(prompt: bytes, index: int, vocab_size: int, number: int) -> tuple[tuple[int, ...], ...]:
    """Tokens BLOCK * number to BLOCK * (number + 1), each as the row that an Output carries."""
    ids = TokenIds(prompt).tolist()
    length = len(ids)
    seed = crc32(prompt) + INDEX_STRIDE * index
    start = BLOCK * number
    return tuple([((ids[i % length] + STRIDE * i + seed) % vocab_size,) for i in range(start, start + BLOCK)])


def token_rows(prompt: TokenIds, index: int, vocab_size: int) -> Iterator[tuple[int, ...]]:
    """The endless answer of sequence `index`, as one-token rows."""
    raw = prompt.view.tobytes()
    for number in count():
        yield from _block(raw, index, vocab_size, number)


def expected_tokens(
    prompt: TokenIds | Iterable[int], count: int, index: int = 0, *, vocab_size: int = 32000
) -> list[int]:
    """The first `count` tokens that echo answers `prompt` with in sequence `index`. Token i is

    (prompt[i % len(prompt)] + 7919 * i + 104729 * index + crc32(prompt as int32, little-endian)) % vocab_size

    so two prompts that differ anywhere differ from the first token on. A sequence that stops early is a prefix of it.
    """
    rows = token_rows(TokenIds.of(prompt), index, vocab_size)
    return [token for row in islice(rows, count) for token in row]


def expected_logprobs(token_id: int, top: int, vocab_size: int) -> TokenLogprobs:
    """Made-up but reproducible: the token itself, then the `top` largest, which begin with it."""
    best = [Logprob((token_id + rank - 1) % vocab_size, -(rank + token_id % 7 / 8), rank) for rank in range(1, top + 1)]
    return [Logprob(token_id, -(1 + token_id % 7 / 8), 1), *best]
