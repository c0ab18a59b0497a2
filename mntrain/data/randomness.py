"""Seeds, and draws from the default generators that leave the caller's states as they were."""

import random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_States: TypeAlias = tuple[Any, Any, torch.Tensor]


def mixed_seed(*values: int) -> int:
    """Return a well-mixed 64-bit seed of non-negative integers, such as (seed, epoch)."""
    return int(mixed_state(1, *values)[0])


def mixed_state(count: int, *values: int) -> npt.NDArray[np.uint64]:
    """Return well-mixed 64-bit numbers of non-negative integers."""
    return np.random.SeedSequence(values).generate_state(count, np.uint64).astype(np.uint64)


def seed_all(seed: int) -> None:
    """Seed the default generators of torch (CPU), Python and numpy."""
    seed %= 1 << 64
    random.seed(seed)
    np.random.seed((seed ^ seed >> 32) % (1 << 32))
    torch.default_generator.manual_seed(seed)


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
