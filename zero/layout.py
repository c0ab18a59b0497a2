"""Where each parameter, bucket and shard lies. Pure: no tensors, no communication.

    parameters, in the order of the model:     a (5)   b (3)   c (4)   d (2)

    backward makes their gradients last first, so the buckets are filled in that order:

    bucket 0  | d d | c c c c |          launched first, while backward goes on
    bucket 1  | b b b | a a a a a |

    shards of bucket 1 over 3 ranks (bounds 0, 2, 5, 8):   | b b | b a a | a a a |

A parameter never straddles two buckets, so its gradient is one view; one that is larger than a
bucket gets a bucket of its own. Shards cut anywhere.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


def split(numel: int, parts: int) -> tuple[int, ...]:
    """Bounds (parts + 1 of them) that cut numel elements into parts, equal to within one."""
    return tuple(i * numel // parts for i in range(parts + 1))


@dataclass(frozen=True)
class Spec:
    """What the plan needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """One parameter's place in a bucket: elements start to stop."""

    spec: Spec
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous run of flat gradients of one dtype."""

    dtype: torch.dtype
    entries: tuple[Entry, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole bucket."""
        return self.entries[-1].stop


def plan_buckets(specs: Sequence[Spec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Lay parameters (in the model's order) into buckets of at most bucket_bytes.

    Buckets come in the order in which backward is expected to fill them. The same on every rank
    that gives the same specs.
    """
    open_runs: dict[torch.dtype, list[Spec]] = {}
    buckets: list[Bucket] = []
    arrival = {spec.name: place for place, spec in enumerate(reversed(specs))}
    for spec in reversed(specs):
        run = open_runs.setdefault(spec.dtype, [])
        held = sum(other.numel for other in run)
        if run and (held + spec.numel) * spec.dtype.itemsize > bucket_bytes:
            buckets.append(_bucket(run))
            run.clear()
        run.append(spec)
    buckets.extend(_bucket(run) for run in open_runs.values() if run)
    return tuple(sorted(buckets, key=lambda bucket: arrival[bucket.entries[-1].spec.name]))


def _bucket(run: Iterable[Spec]) -> Bucket:
    entries: list[Entry] = []
    start = 0
    for spec in run:
        entries.append(Entry(spec, start, start + spec.numel))
        start += spec.numel
    return Bucket(entries[0].spec.dtype, tuple(entries))
