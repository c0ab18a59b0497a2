"""What ranks put into tensors, so that every result can be checked to the bit.

All numbers and all their partial sums are small and whole: no dtype rounds them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Numbers repeat after 5 * 11 elements: no size of a piece, a lane or a shard that is a power of two
# is a multiple of that, so data in the wrong place is wrong data.
_PERIOD = 55
_TILE = _PERIOD << 12


class Pattern:
    """What a rank contributes at every element, and what the sum over all ranks is there.

    `mine` of rank r at element i is (i + 13 r) mod 5 - 2, and on rank 0 also i mod 11. Over any
    five ranks in a row the former adds up to 0. Both are kept as one tile, which repeats.
    """

    def __init__(self, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        index = torch.arange(_TILE)
        base = index % 11
        mine = _cycle(index, rank) + (base if rank == 0 else 0)
        total = base + sum(_cycle(index, other) for other in range(size % 5))
        self.mine = mine.to(device, dtype)
        self.total = total.to(device, dtype)


def write(part: Tensor, tile: Tensor, at: int = 0) -> None:
    """Put the pattern of a tile into a part of a flat tensor, which begins at its element `at`."""
    for start, stop, piece in _pieces(part, tile, at):
        part[start:stop] = piece


def holds(part: Tensor, tile: Tensor, at: int = 0) -> bool:
    """Whether a flat part of a tensor has the pattern of a tile. Arguments are those of `write`."""
    return all(
        torch.equal(part[start:stop], piece) for start, stop, piece in _pieces(part, tile, at)
    )


def _cycle(index: Tensor, rank: int) -> Tensor:
    return (index + 13 * rank) % 5 - 2


def _pieces(part: Tensor, tile: Tensor, at: int) -> Iterator[tuple[int, int, Tensor]]:
    """Runs of the part that do not cross a tile's end, and what of the tile they are."""
    start = 0
    while start < part.numel():
        low = (at + start) % _TILE
        stop = min(part.numel(), start + _TILE - low)
        yield start, stop, tile[low : low + stop - start]
        start = stop
