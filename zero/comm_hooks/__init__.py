"""Communication hooks: how the gradients of a bucket are summed over ranks.

A hook is called with every bucket that backward has filled, in the same order on every rank, and
returns the `Work` that leaves the sum in it. As in DDP, a hook may cast or compress:

    def __call__(self, bucket: ReducibleBucket) -> Work:
        return ChainedWork(self._steps(bucket))

    def _steps(self, bucket: ReducibleBucket) -> Iterator[Work]:
        encoded = ...                                    # encode
        yield bucket.collectives.all_gather(encoded)     # exchange
        bucket.gradients.copy_(...)                      # decode

    HOOKS = {"my-compressor": MyCompressor}

Modules of this package name hooks that need no arguments in `HOOKS`, so a new compressor is one new
module. In a group of one rank no hook is called. A hook that treats traffic between nodes unlike
that within them sets `between_nodes`: its buckets then have the collectives of both levels
(`zero.comm_hooks.between_nodes`).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
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
        own_slots      | of node 0: 0 to 2, 3 to 4; of node 1: 2 to 3, 4 to 5
    """

    node: Collectives  # this rank's node
    cross: Collectives  # the ranks with this local rank, by node
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each
    lane_slots: tuple[int, ...]  # lane k has the slots lane_slots[k] to lane_slots[k + 1]
    own_slots: tuple[tuple[int, int], ...]  # of this node's ranks, by lane

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.own_slots)

    @property
    def lane(self) -> int | None:
        """The lane that this rank owns on its node; None for a rank without one."""
        own = self.node.slot(self.node.rank)
        return own if own < self.lanes else None

    def lane_bounds(self, layout: Bucket) -> list[int]:
        """Return the bounds of a bucket's lanes, as shards of the node's ranks."""
        bounds = [layout.bounds[slot] for slot in self.lane_slots]
        return bounds + [layout.numel] * (self.node.size - self.lanes)

    def own_range(self, layout: Bucket) -> tuple[int, int]:
        """Return the elements of a bucket that lie in this rank's lane; empty without one."""
        if self.lane is None:
            return layout.numel, layout.numel
        bounds = self.lane_bounds(layout)
        return bounds[self.lane], bounds[self.lane + 1]

    def node_range(self, layout: Bucket, lane: int) -> tuple[int, int]:
        """Return the elements of a lane that this node's ranks own at stages 1 and 2."""
        first, last = self.own_slots[lane]
        return layout.bounds[first], layout.bounds[last]


@dataclass(frozen=True)
class ReducibleBucket:
    """A full bucket, ready to be reduced over a group of ranks."""

    index: int  # of the bucket: the same in every step and on every rank
    layout: Bucket
    gradients: Tensor  # flat, layout.numel elements of layout.dtype; the hook overwrites it
    collectives: Collectives  # the group
    sharded: bool  # whether only this rank's shard of the sum is needed
    levels: NodeLevels | None = None  # of the group; for hooks that are `between_nodes`
    # The mean gradient is the sum times this, divided by what `CommHook.end_reduction` is told.
    multiplier: float = 1.0
    last: bool = False  # whether no bucket follows in this round
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # of the model, by name

    @property
    def shard(self) -> Tensor:
        """The elements of `gradients` whose sum this rank needs. A view."""
        if not self.sharded:
            return self.gradients
        start, stop = self.layout.shard(self.collectives.slot(self.collectives.rank))
        return self.gradients[start:stop]

    def reduce(self, wire: torch.dtype | None = None) -> Work:
        """Start the all-reduce or reduce-scatter that the bucket needs. Collective."""
        collectives = self.collectives.named(f"gradient bucket {self.index}")
        if self.sharded:
            return collectives.reduce_scatter(self.gradients, self.layout.bounds, wire=wire)
        return collectives.all_reduce(self.gradients, wire=wire)


class CommHook:
    """The hook that sums buckets, and base class of others, which may have a state on every rank.

    Sums travel between nodes in `wire_dtype`, if it is narrower than theirs: the collectives round
    each node's sum and add the rounded sums in fp32; within a node nothing is rounded. With fp16
    the optimizer scales gradients so that a sum over ranks is no larger than a rank's gradient
    times the number of ranks.
    """

    wire_dtype: torch.dtype | None = None
    between_nodes = False  # whether the hook needs `ReducibleBucket.levels`
    bound = False  # whether an optimizer has such a hook
    world_only = False  # whether the hook reduces over all ranks, whatever the bucket's group is

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        self.wire_dtype = wire_dtype

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start to sum a bucket over its group, in place. Collective.

        When the work has finished, `bucket.shard` holds the sum, with the same bits on every rank
        that needs them. The gradients belong to the work until then. A hook that launches further
        collectives once the first has finished returns a `ChainedWork`.
        """
        return bucket.reduce(narrower(self.wire_dtype, bucket.gradients.dtype))

    def expect_size(self, size: int) -> None:
        """Raise ValueError if the hook cannot serve a group of so many ranks. Local."""

    def note(self, nodes: int, *, sharded: bool) -> str:
        """Return what a user should know of this hook on so many nodes; empty if nothing. Local."""
        return ""

    def end_reduction(self, divisor: float) -> None:
        """Note that the buckets since the last call are reduced, and divided by `divisor`. Local.

        A step has one reduction, unless several backward passes outside of `no_sync` precede it.
        """

    def end_step(self, *, taken: bool) -> None:
        """Note that a step ends; without `taken`, its gradients are dropped. Local."""

    def reset(self) -> None:
        """Forget the state. Local."""

    def nbytes(self) -> int:
        """Return the bytes of this rank's state. Local."""
        return 0

    def expected_nbytes(self, plan: Sequence[Bucket], levels: NodeLevels | None) -> int:
        """Return what `nbytes` will be after a step with the buckets of a plan. Local."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, such as error feedback; by default empty. Local.

        It is restored on the same rank of a group of the same size with the same buckets only.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Local."""


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


_WIRES = {
    "uncompressed": None,
    "fp32": torch.float32,  # narrower than fp64 gradients
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def names() -> list[str]:
    """Return the names of all hooks; imports the modules of this package."""
    return sorted(_hooks())


def make_hook(hook: str | CommHook | None, wire_dtype: torch.dtype | None = None) -> CommHook:
    """Return a hook by name, or as it is; by default the one that casts to a wire dtype.

    Raises ValueError for an unknown name or wire dtype, and for a wire dtype beside a hook.
    """
    check_travel_dtype("wire_dtype", wire_dtype)
    if hook is None:
        return CommHook(wire_dtype)
    if wire_dtype not in (None, torch.float32):
        raise ValueError("a communication hook decides the wire dtype: give one of the two")
    if isinstance(hook, CommHook):
        return hook
    if not isinstance(hook, str):
        raise ValueError(
            f"comm_hook is of type {type(hook).__name__}: give a name or a zero.comm_hooks.CommHook"
        )
    if hook not in (hooks := _hooks()):
        raise ValueError(f"comm_hook {hook!r} is unknown: choose one of {', '.join(sorted(hooks))}")
    return hooks[hook]()


def _hooks() -> dict[str, Callable[[], CommHook]]:
    """Return the factory of each hook, by name: of casts, and of the `HOOKS` of modules here."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    named = {name: make for m in modules for name, make in getattr(m, "HOOKS", {}).items()}
    return {name: partial(CommHook, dtype) for name, dtype in _WIRES.items()} | named


def bind_hook(
    hook: CommHook, levels: NodeLevels | None, *, size: int, scheduled: bool
) -> NodeLevels | None:
    """Let a hook serve an optimizer on `size` ranks; return the levels that its buckets have.

    `scheduled` means a sync schedule of the user's. Raises ValueError for a hook that cannot serve
    so many ranks, for one between nodes with a schedule, without levels, or in use, and for one
    over all ranks with a schedule.
    """
    if size == 1:
        return None
    hook.expect_size(size)
    name = type(hook).__name__
    if not (hook.between_nodes or hook.world_only):
        return None
    if scheduled and hook.world_only:
        raise ValueError(
            f"comm_hook {name} communicates over all ranks, and a sync schedule over those of a "
            "node: give one of the two"
        )
    if scheduled:
        raise ValueError(
            f"comm_hook {name} compresses what crosses nodes in every step, and a schedule decides "
            "when anything does: give one of the two"
        )
    if hook.between_nodes and levels is None:
        raise ValueError(f"comm_hook {name} needs `levels`: world.optimizer gives them")
    if hook.bound:
        raise ValueError(
            f"comm_hook {name} keeps a state for another optimizer: make a hook for each"
        )
    hook.bound = True
    return levels if hook.between_nodes else None


class HookState:
    """The state of a hook with what it depends on: the rank, the size, nodes and buckets.

    `orders` are those of the parameters in memory (`zero.kernels.order`), by name. `used` are the
    names of parameters of which the hook may have gradients that were not sent.
    """

    def __init__(
        self,
        hook: CommHook,
        group: Collectives,
        plan: Sequence[Bucket],
        levels: NodeLevels | None,
        *,
        orders: Mapping[str, tuple[int, ...]],
        used: set[str],
    ) -> None:
        self._hook, self._group, self._used = hook, group, used
        self._context: list[Any] = [type(hook).__name__, group.rank, group.size]
        if levels is None:
            self._context.append([bucket.numel for bucket in plan])
        else:
            self._context.append([[bucket.numel, *bucket.bounds] for bucket in plan])
            self._context.append([*map(list, levels.nodes)])
        if turned := [[n, *order] for n, order in orders.items() if list(order) != sorted(order)]:
            self._context.append(turned)

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state on this rank. Local."""
        state = self._hook.state_dict()
        return {"context": self._context, "state": state, "used": sorted(self._used)}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned; warn if its hook, ranks or buckets differ. Local.

        Without a state that fits, the hook starts anew.
        """
        self._hook.reset()
        self._used.clear()
        if saved is None or not (saved["state"] or saved.get("used")):
            return
        if saved["context"] == self._context:
            if saved["state"]:  # a rank that owns no lane has none, and knows the names too
                self._hook.load_state_dict(saved["state"])
            self._used.update(saved.get("used", ()))
        elif self._group.rank == 0:
            warnings.warn(
                "the state is of another comm_hook, size or layout: the hook starts anew",
                stacklevel=3,
            )
