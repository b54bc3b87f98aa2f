"""Random numbers that are a function of a key and a counter, so that a draw depends on nothing else.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), over numpy columns.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
"""32-bit words in 64-bit columns, so that products do not overflow."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10


def philox(counter: Words, key: Words) -> Words:
    """counter: [4, n] words, key: [2, n] words -> [4, n] random words."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products[::-1] >> _SHIFT) ^ odd ^ key
        odd = products[::-1] & _LOW
        key = (key + _WEYL) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: Words, indexes: Words, positions: Words) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row, from its seed, sequence index and output position alone."""
    zeros = np.zeros_like(positions)
    words = philox(np.stack((positions, zeros, indexes, zeros)), np.stack((seeds & _LOW, seeds >> _SHIFT)))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    return np.asarray(bits.astype(np.float64) * 2.0**-53)
