"""Seeds, seeded draws from the default generators, and a permutation of any size."""

import random
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_States: TypeAlias = tuple[Any, Any, torch.Tensor]

_ROUNDS = 8
_BLOCK = 1 << 13  # elements of a permutation that are computed at once
# Odd constants of the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed_seed(*values: int) -> int:
    """Return a well-mixed 64-bit seed of non-negative integers, such as (seed, epoch)."""
    return int(_mixed(1, *values)[0])


def _mixed(count: int, *values: int) -> npt.NDArray[np.uint64]:
    return np.random.SeedSequence(values).generate_state(count, np.uint64).astype(np.uint64)


def seed_all(seed: int) -> None:
    """Seed the default generators of torch (CPU), Python and numpy."""
    seed %= 1 << 64
    random.seed(seed)
    np.random.seed((seed ^ seed >> 32) % (1 << 32))
    torch.default_generator.manual_seed(seed)


def seed_process(seed: int) -> None:
    """Seed the default generators of torch (also of devices), Python and numpy."""
    seed_all(seed)
    torch.manual_seed(seed)


class SeededDraws:
    """A context in which the default generators of torch (CPU), Python and numpy are seeded.

    After the block they have the caller's states again. The next block continues where the last
    one ended. The generators are those of the process, so one thread at a time may draw.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _States | None = None  # after the last block
        self._callers: _States | None = None

    def __enter__(self) -> None:
        self._callers = _states()
        if self._own is None:
            seed_all(self._seed)
        else:
            _restore(self._own)

    def __exit__(self, *error: object) -> None:
        assert self._callers is not None
        self._own = _states()
        _restore(self._callers)


def _states() -> _States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def permuted(start: int, stop: int, size: int, *key: int) -> npt.NDArray[np.int64]:
    """Return the elements [start, stop) of a permutation of range(size), new, 1-D.

    The permutation is a function of the size and the key, non-negative integers such as
    (seed, epoch). A Feistel network permutes the numbers of an even count of bits; a result that is
    too large is permuted again, until it is not (J. Black and P. Rogaway, "Ciphers with arbitrary
    finite domains", 2002). Memory is that of the part, whatever the size.
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
    keys = _mixed(_ROUNDS, *key)
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
