"""What a block of the KV cache holds, as a number: a hash of its tokens and of all that stands before them.

The same in every process and on every machine, so that a router may compute it too. A chain begins at `root`; the hash
of a block is that of the block before it (or the root) and of its own tokens:

    root  = blake2b(part(adapter) + part(salt), digest_size=16, person="tllm-kv-root")
    block = blake2b(before + token ids as little-endian int32, digest_size=16, person="tllm-kv-block")
    part(text) = its length in bytes as a decimal number, ":", and its UTF-8; part(None) = "-"

128 bits of a cryptographic hash: nobody can find two prompts of one hash, so that tokens need not be compared.
Events give the first 64 bits as an unsigned little-endian number.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b

_ROOT, _BLOCK, _BYTES = b"tllm-kv-root", b"tllm-kv-block", 16


def root(salt: str | None = None, adapter: str | None = None) -> bytes:
    """Where chains begin that may share blocks: those of one salt and one adapter. None is another salt than ""."""
    return blake2b(_part(adapter) + _part(salt), digest_size=_BYTES, person=_ROOT).digest()


def extend(chain: list[bytes], begin: bytes, token_ids: array[int], size: int, count: int) -> None:
    """Makes `chain` as long as `count` blocks of `size` tokens; `begin` is its root. token_ids: int32, from the start."""
    before = chain[-1] if chain else begin
    for block in range(len(chain), count):
        tokens = token_ids[block * size : (block + 1) * size]
        if sys.byteorder != "little":
            tokens.byteswap()
        before = blake2b(before + tokens.tobytes(), digest_size=_BYTES, person=_BLOCK).digest()
        chain.append(before)


def number(content: bytes) -> int:
    """The hash as events give it."""
    return int.from_bytes(content[:8], "little")


def _part(text: str | None) -> bytes:
    if text is None:
        return b"-"
    encoded = text.encode(errors="surrogatepass")
    return b"%d:%b" % (len(encoded), encoded)
