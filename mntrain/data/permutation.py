"""A pseudorandom permutation of any size, of which each part is computed by itself.

A Feistel network permutes the numbers of an even count of bits; a result that is too large is
permuted again, until it is not (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains",
2002). Memory is that of the part which is asked for, whatever the size.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mntrain.data.randomness import mixed_state

_ROUNDS = 8
_BLOCK = 1 << 13  # elements
# Odd constants of the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permuted(start: int, stop: int, size: int, *key: int) -> npt.NDArray[np.int64]:
    """Return the elements [start, stop) of a permutation of range(size), new, 1-D.

    The permutation is a function of the size and the key, non-negative integers such as
    (seed, epoch). Local; the last blocks of elements are cached.
    """
    parts = [np.empty(0, dtype=np.int64)]
    for number in range(start // _BLOCK, -(-stop // _BLOCK)):
        first = number * _BLOCK
        parts.append(_block(first, size, key)[max(0, start - first) : stop - first])
    return np.concatenate(parts)


@lru_cache(maxsize=4)
def _block(first: int, size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the elements of a block: 8192 take 7 times as long as 8."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits
    keys = mixed_state(_ROUNDS, *key)
    values = np.arange(first, min(first + _BLOCK, size), dtype=np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _permute(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _permute(
    values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Return a permutation of numbers of 2 * half bits, applied to some of them."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        mixed = (right ^ key) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << bits) | right
