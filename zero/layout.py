"""Where each parameter, bucket and shard lies. Pure: no tensors, no communication.

    parameters, in the order of the model:     a (5)   b (3)   c (4)   d (2)

    backward makes their gradients last first, so the buckets are filled in that order:

    bucket 0  | d d | c c c c |          launched first, while backward goes on
    bucket 1  | b b b | a a a a a |

A parameter never straddles two buckets, so its gradient is one view; one that is larger than a
bucket gets a bucket of its own. Of every bucket each rank owns one shard:

    by element, 3 ranks (bounds 0, 2, 5, 8):     | b b | b a a | a a a |      shards cut anywhere
    by parameter (bounds 0, 5, 5, 8):            | a a a a a | | b b b |      parameters stay whole

What of a parameter lies in a shard is a piece: here the second rank owns the piece b[2:3] and the
piece a[0:2], or nothing (but c, in bucket 0).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

MIB = 2**20
# The first bucket leaves as soon as it has this, so that the wire has something to do early in
# backward; the last one has no more than it needs to have this, for nothing overlaps it.
ENDS = MIB
LEAST_BUCKETS = 8  # that a model is laid into, if each can have a MiB: so that they can overlap
EVEN = 64  # elements: of any dtype more than a GPU reads at a time


@lru_cache(maxsize=1024)
def split(numel: int, parts: int) -> tuple[int, ...]:
    """Bounds (parts + 1 of them) that cut numel elements into parts, equal to within one."""
    return tuple(i * numel // parts for i in range(parts + 1))


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketEntry:
    """One parameter's place in a bucket: elements start to stop."""

    spec: ParameterSpec
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterSlice:
    """Elements low to high of a parameter, which lie from `start` on in its bucket."""

    spec: ParameterSpec
    start: int
    low: int
    high: int

    @property
    def numel(self) -> int:
        """Number of elements, at least 1."""
        return self.high - self.low

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.numel == self.spec.numel


@dataclass(frozen=True)
class Bucket:
    """A contiguous run of parameters of one dtype, and the shards that it is cut into."""

    dtype: torch.dtype
    entries: tuple[BucketEntry, ...]
    bounds: tuple[int, ...]  # slot i owns the elements bounds[i] to bounds[i + 1]

    @property
    def numel(self) -> int:
        """Number of elements of the whole bucket."""
        return self.entries[-1].stop

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket, in its own dtype."""
        return self.numel * self.dtype.itemsize

    def shard(self, slot: int) -> tuple[int, int]:
        """The elements, from and to, that a slot owns."""
        return self.bounds[slot], self.bounds[slot + 1]

    def pieces(self, start: int, stop: int) -> list[ParameterSlice]:
        """What lies between two elements of the bucket, by parameter; none is empty."""
        found = []
        for entry in self.entries:
            low, high = max(start, entry.start), min(stop, entry.stop)
            if low < high:
                found.append(ParameterSlice(entry.spec, low, low - entry.start, high - entry.start))
        return found


def plan_buckets(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
    shards: int = 1,
    loads: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Lay parameters (in the model's order) into buckets of at most bucket_bytes.

    A model that would fill less than eight gets smaller ones, though none below a MiB; the first
    and the last one are smaller where parameters allow. Buckets come in the order in which backward
    is expected to fill them. Shards are equal to within
    an element; with `loads`, the elements that each slot owns elsewhere, parameters stay whole and
    are dealt so that the totals are balanced. The same on every rank that gives the same.
    """
    owner = None if loads is None else _deal(specs, loads)
    total = _nbytes(specs)
    bucket_bytes = min(bucket_bytes, max(MIB, total // LEAST_BUCKETS))
    open_runs: dict[torch.dtype, list[ParameterSpec]] = {}
    runs: list[list[ParameterSpec]] = []
    for spec in reversed(specs):
        run = open_runs.setdefault(spec.dtype, [])
        if run and _nbytes([*run, spec]) > bucket_bytes:
            runs.append(list(run))
            run.clear()
        run.append(spec)
        if not runs and _nbytes(run) >= ENDS:
            runs.append(list(run))
            run.clear()
    runs.extend(run for run in open_runs.values() if run)
    arrival = {spec.name: place for place, spec in enumerate(reversed(specs))}
    runs.sort(key=lambda run: max(arrival[spec.name] for spec in run))
    runs[-1:] = _short_end(runs[-1]) if runs else []
    return tuple(_bucket(run, shards, owner) for run in runs)


def _nbytes(run: Sequence[ParameterSpec]) -> int:
    return sum(spec.numel * spec.dtype.itemsize for spec in run)


def _short_end(run: list[ParameterSpec]) -> list[list[ParameterSpec]]:
    """The last bucket's parameters in two: of its end no more than has the bytes of an end."""
    start = next((i for i in reversed(range(len(run))) if _nbytes(run[i:]) >= ENDS), 0)
    return [run[:start], run[start:]] if start else [run]


def _deal(specs: Sequence[ParameterSpec], loads: Sequence[int]) -> dict[str, int]:
    """The slot that owns each parameter: the largest first, to whoever has the least.

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
    # What would leave those behind it at odd addresses goes last: a GPU reads them slowly there.
    specs = sorted(run, key=lambda spec: spec.numel % EVEN != 0)
    if owner is not None:
        specs.sort(key=lambda spec: owner[spec.name])
    entries: list[BucketEntry] = []
    start = 0
    for spec in specs:
        entries.append(BucketEntry(spec, start, start + spec.numel))
        start += spec.numel
    bounds = split(start, shards)
    if owner is not None:
        owned = [0] * shards
        for spec in specs:
            owned[owner[spec.name]] += spec.numel
        bounds = (0, *accumulate(owned))
    return Bucket(entries[0].spec.dtype, tuple(entries), bounds)
