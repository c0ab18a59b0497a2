"""Communication hooks: how the gradients of a bucket are summed over ranks.

A hook is called with every bucket that backward has filled, in the same order on every rank, and
returns the `Work` that leaves the sum in it. As in DDP, a hook may cast or compress:

    def __call__(self, bucket: ReducibleBucket) -> Work:
        return ChainedWork(self._steps(bucket))

    def _steps(self, bucket: ReducibleBucket) -> Iterator[Work]:
        encoded = ...                                    # encode
        yield bucket.collectives.all_gather(encoded)     # exchange
        bucket.gradients.copy_(...)                      # decode

The plain sum of a bucket is `super().__call__(bucket)`.

In a group of one rank no hook is called. A hook that treats traffic between nodes unlike that
within them sets `between_nodes`: it has the collectives of both levels as `levels` then
(`zero.comm_hooks.between_nodes`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.layout import Bucket
from zero.precision import check_travel_dtype, narrower


@dataclass(frozen=True)
class NodeLevels:
    """The nodes of a group of ranks, as one of them sees them.

    The slots of the group are ordered by lane, then by node. Lane k consists of the shards that
    local rank k of each node exchanges with the others; there are as many lanes as the smallest
    node has ranks. With nodes of 3 and 2 ranks, and local ranks that are in the order of slots:

        slots          | 0     | 1     | 2      | 3      | 4      |
        owners         | 0.0   | 0.2   | 1.0    | 0.1    | 1.1    |      node.local rank
        lane_slots     0                        3                 5
    """

    node: Collectives  # this rank's node
    cross: Collectives  # the ranks with this local rank, by node
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each
    lane_slots: tuple[int, ...]  # lane k has the slots lane_slots[k] to lane_slots[k + 1]

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.lane_slots) - 1

    def lane_bounds(self, layout: Bucket) -> list[int]:
        """Return the bounds of a bucket's lanes by the node's slots; others have no elements."""
        bounds = [layout.bounds[slot] for slot in self.lane_slots]
        return bounds + [layout.numel] * (self.node.size - self.lanes)


@dataclass(frozen=True)
class ReducibleBucket:
    """A full bucket, ready to be reduced over a group of ranks."""

    index: int  # of the bucket: the same in every step and on every rank
    layout: Bucket
    gradients: Tensor  # flat, layout.numel elements of layout.dtype; the hook overwrites it
    collectives: Collectives  # the group
    sharded: bool  # whether only this rank's shard of the sum is needed
    # The mean gradient is the sum times this, divided by what `CommHook.end_reduction` is told.
    multiplier: float = 1.0
    last: bool = False  # whether it is the last of all
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # of the model, by name

    @property
    def shard(self) -> Tensor:
        """The elements of `gradients` whose sum this rank needs. A view."""
        if not self.sharded:
            return self.gradients
        start, stop = self.layout.shard(self.collectives.slot(self.collectives.rank))
        return self.gradients[start:stop]


class CommHook:
    """The hook that sums buckets, and base class of others, which may have a state on every rank.

    Sums travel between nodes in `wire_dtype`, if it is narrower than theirs: the collectives round
    each node's sum and add the rounded sums in fp32; within a node nothing is rounded. With fp16
    the optimizer scales gradients before, so that a sum over ranks is no larger than their mean.
    """

    wire_dtype: torch.dtype | None = None
    between_nodes = False  # whether the hook needs `levels`
    levels: NodeLevels | None = None  # those of an optimizer on several ranks, if it needs them
    world_only = False  # whether the hook reduces over all ranks, whatever the bucket's group is
    _bound = False  # to an optimizer

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        self.wire_dtype = wire_dtype

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start to sum a bucket over its group, in place. Collective.

        When the work has finished, `bucket.shard` holds the sum, with the same bits on every rank
        that needs them. The gradients belong to the work until then. A hook that launches further
        collectives once the first has finished returns a `ChainedWork`.
        """
        wire = self.wire_dtype and narrower(self.wire_dtype, bucket.gradients.dtype)
        collectives = bucket.collectives.named(f"gradient bucket {bucket.index}")
        if bucket.sharded:
            return collectives.reduce_scatter(bucket.gradients, bucket.layout.bounds, wire=wire)
        return collectives.all_reduce(bucket.gradients, wire=wire)

    def bind(self, size: int, levels: NodeLevels | None, *, scheduled: bool) -> None:
        """Let the hook serve an optimizer on so many ranks, at least 2. Local.

        `scheduled` means with a sync schedule. Raises ValueError for a hook over all ranks or nodes
        with one, or in use by another optimizer, and for one between nodes without levels.
        """
        if not (self.between_nodes or self.world_only):
            return
        name = type(self).__name__
        if scheduled:
            raise ValueError(
                f"comm_hook {name} communicates over all ranks in every step, and a sync schedule "
                "decides when anything crosses nodes: give one of the two"
            )
        if self.between_nodes and levels is None:
            raise ValueError(f"comm_hook {name} needs `levels`: world.optimizer gives them")
        if self._bound:
            raise ValueError(
                f"comm_hook {name} keeps a state for another optimizer: make a hook for each"
            )
        self._bound, self.levels = True, levels if self.between_nodes else None

    @property
    def several_nodes(self) -> bool:
        """True if the hook treats the traffic between several nodes by itself."""
        return self.levels is not None and len(self.levels.nodes) > 1

    def note(self, nodes: int, *, sharded: bool) -> str:
        """Return what a user should know of this hook on so many nodes; empty if nothing. Local."""
        return ""

    def end_reduction(self, divisor: float) -> None:
        """Note that the buckets since the last call are reduced, and divided by `divisor`. Local.

        A step has one reduction, unless several backward passes outside of `no_sync` precede it.
        """

    def end_step(self, *, taken: bool) -> None:
        """Note that a step ends; without `taken`, its gradients are dropped. Local."""

    def nbytes(self) -> int:
        """Return the bytes of this rank's state. Local."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, such as error feedback; by default empty. Local.

        It is restored on the same rank of a group of the same size with the same buckets only.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank; an empty one starts anew. Local."""


def make_hook(hook: CommHook | None, wire_dtype: torch.dtype | None = None) -> CommHook:
    """Return a hook as it is; by default the one that casts to a wire dtype.

    Raises ValueError for another object or wire dtype, and for a wire dtype beside a hook.
    """
    check_travel_dtype("wire_dtype", wire_dtype)
    if hook is None:
        return CommHook(wire_dtype)
    if not isinstance(hook, CommHook):
        raise ValueError(
            f"comm_hook is {hook!r}: give an object of a subclass of zero.comm_hooks.CommHook, "
            "such as CommHook(torch.bfloat16)"
        )
    if wire_dtype not in (None, torch.float32):
        raise ValueError("a communication hook decides the wire dtype: give one of the two")
    return hook


class ChainedWork:
    """Several collectives, each of which starts when the one before has finished.

    `steps` is a generator that yields works. It runs up to its first work at once, and from one
    work to the next inside `advance` and `wait`, which have to be called at the same point of the
    program on every rank: the optimizer does so when it launches a bucket and at the end of
    backward.
    """

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._current = next(steps, None)

    def advance(self) -> bool:
        """Wait for the current collective and start the next; return whether there is one."""
        if self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)
        return self._current is not None

    def done(self) -> bool:
        """Return whether the current collective has finished. Local."""
        return self._current is None or self._current.done()

    def wait(self) -> None:
        """Run all steps."""
        while self.advance():
            pass


def wait_all(works: Iterable[Work]) -> None:
    """Wait for works in order; chains advance in turns, so that their collectives overlap."""
    pending = list(works)
    while pending:
        chains: list[Work] = []
        for work in pending:
            if not isinstance(work, ChainedWork):
                work.wait()
            elif work.advance():
                chains.append(work)
        pending = chains
