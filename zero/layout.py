"""The layout of buckets and shards. Pure: no tensors, no communication.

    parameters, in the order of forward:     a (5)   b (3)   c (4)   d (2)

    backward makes gradients in reverse order, so buckets are filled in that order:

    bucket 0  | d d | c c c c |          reduced first, during backward
    bucket 1  | b b b | a a a a a |

A parameter lies in one bucket, so its gradient is one view; one that is larger than the bucket size
has a bucket of its own. Each rank owns one shard of every bucket:

    by element, 3 ranks (bounds 0, 2, 5, 8):     | b b | b a a | a a a |      cut anywhere
    by parameter (bounds 0, 5, 5, 8):            | a a a a a | | b b b |      whole parameters

A slice of a parameter that lies in a shard is a piece: in the first of these cuts, the second rank
owns b[2:3] and a[0:2].
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import index

import torch

MIB = 2**20
# Bytes of the first bucket, so that communication starts early in backward, and of the last one,
# which no computation overlaps.
END_BYTES = MIB
LEAST_BUCKETS = 8  # of a model, unless buckets would be smaller than a MiB: so that they overlap
ALIGNED_NUMEL = 64  # elements that keep the next parameter aligned for a GPU, whatever the dtype


@lru_cache(maxsize=1024)
def split(numel: int, parts: int) -> tuple[int, ...]:
    """Return the parts + 1 bounds that cut numel elements into parts, equal to within one."""
    return tuple(i * numel // parts for i in range(parts + 1))


def shard_bounds(bounds: Sequence[int] | None, numel: int, size: int) -> tuple[int, ...]:
    """Return a caller's bounds, as a tuple of int, or those of equal shards. Local.

    Raises ValueError for bounds that do not cut `numel` elements into `size` shards.
    """
    if bounds is None:
        return split(numel, size)
    cut = tuple(map(index, bounds))
    if (
        len(cut) != size + 1
        or (cut[0], cut[-1]) != (0, numel)
        or any(low > high for low, high in pairwise(cut))
    ):
        raise ValueError(
            f"bounds {cut} do not cut {numel} elements into {size} shards: give {size + 1} "
            f"indices that never decrease, from 0 to {numel}"
        )
    return cut


@dataclass(frozen=True)
class ParameterSpec:
    """Name, shape and dtype of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterSlice:
    """Elements low to high of a parameter, from element `start` of its bucket on."""

    spec: ParameterSpec
    start: int
    low: int
    high: int

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return self.high - self.low

    @cached_property
    def stop(self) -> int:
        """The element of the bucket after the last one."""
        return self.start + self.numel

    @cached_property
    def whole(self) -> bool:
        """True for the whole parameter."""
        return self.numel == self.spec.numel


@dataclass(frozen=True)
class Bucket:
    """Contiguous parameters of one dtype, and the bounds of their shards."""

    dtype: torch.dtype
    entries: tuple[ParameterSlice, ...]  # whole parameters
    bounds: tuple[int, ...]  # slot i owns the elements bounds[i] to bounds[i + 1]

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole bucket."""
        return self.entries[-1].stop

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole bucket, in its own dtype."""
        return self.numel * self.dtype.itemsize

    def shard(self, slot: int) -> tuple[int, int]:
        """Return the range of elements (from, to) that a slot owns."""
        return self.bounds[slot], self.bounds[slot + 1]

    def pieces(self, start: int, stop: int) -> list[ParameterSlice]:
        """Return the non-empty slices of parameters between two elements of the bucket."""
        cuts = [(e, max(start, e.start), min(stop, e.stop)) for e in self.entries]
        return [
            ParameterSlice(entry.spec, low, low - entry.start, high - entry.start)
            for entry, low, high in cuts
            if low < high
        ]


def lay_out(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
    shards: int = 1,
    loads: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Return buckets of at most bucket_bytes for parameters in the order of forward.

    A model that would fill fewer than eight buckets gets smaller ones, but none below a MiB; the
    first and the last one are smaller if parameters allow. Buckets are in the order in which
    backward should fill them. Shards are equal, to within an element. With `loads`, the elements
    that each slot owns elsewhere, parameters stay whole and are dealt so that totals are balanced.
    """
    owner = None if loads is None else _deal(specs, loads)
    bucket_bytes = min(bucket_bytes, max(MIB, _nbytes(specs) // LEAST_BUCKETS))
    open_runs: dict[torch.dtype, list[ParameterSpec]] = {}
    runs: list[list[ParameterSpec]] = []
    for spec in reversed(specs):
        run = open_runs.setdefault(spec.dtype, [])
        if run and _nbytes([*run, spec]) > bucket_bytes:
            runs.append(open_runs.pop(spec.dtype))
            run = open_runs.setdefault(spec.dtype, [])
        run.append(spec)
        if not runs and _nbytes(run) >= END_BYTES:
            runs.append(open_runs.pop(spec.dtype))
    runs.extend(open_runs.values())
    arrival = {spec.name: place for place, spec in enumerate(reversed(specs))}
    runs.sort(key=lambda run: max(arrival[spec.name] for spec in run))
    runs[-1:] = _split_off_end(runs[-1]) if runs else []
    return tuple(_bucket(run, shards, owner) for run in runs)


def _nbytes(run: Sequence[ParameterSpec]) -> int:
    return sum(spec.numel * spec.dtype.itemsize for spec in run)


def _split_off_end(run: list[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Split the last bucket so that its end is as small as END_BYTES allows."""
    start = next((i for i in reversed(range(len(run))) if _nbytes(run[i:]) >= END_BYTES), 0)
    return [run[:start], run[start:]] if start else [run]


def _deal(specs: Sequence[ParameterSpec], loads: Sequence[int]) -> dict[str, int]:
    """Return the slot that owns each parameter: the largest first, to the slot with the least.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
    """
    total = list(loads)
    owner = {}
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        slot = total.index(min(total))
        owner[spec.name] = slot
        total[slot] += spec.numel
    return owner


def _bucket(run: Iterable[ParameterSpec], shards: int, owner: dict[str, int] | None) -> Bucket:
    # Parameters of unaligned length go last, since a GPU reads unaligned ones behind them slowly.
    specs = sorted(run, key=lambda spec: spec.numel % ALIGNED_NUMEL != 0)
    if owner is not None:
        specs.sort(key=lambda spec: owner[spec.name])
    starts = [0, *accumulate(spec.numel for spec in specs)]
    entries = tuple(
        ParameterSlice(spec, start, 0, spec.numel)
        for spec, start in zip(specs, starts[:-1], strict=True)
    )
    bounds = split(starts[-1], shards)
    if owner is not None:
        owned = [0] * shards
        for spec in specs:
            owned[owner[spec.name]] += spec.numel
        bounds = (0, *accumulate(owned))
    return Bucket(specs[0].dtype, entries, bounds)
