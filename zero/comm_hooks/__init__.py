"""Communication hooks: how the gradients of a bucket are summed over ranks.

A hook is called with every bucket that backward has filled, in the same order on every rank, and
returns the `Work` that leaves the sum in it. As in DDP, a hook may cast or compress:

    class MyCompressor(CommHook):
        def __call__(self, bucket: ReducibleBucket) -> Work:
            return ChainedWork(self._steps(bucket))

        def _steps(self, bucket: ReducibleBucket) -> Iterator[Work]:
            encoded = ...                                    # encode
            yield bucket.collectives.all_gather(encoded)     # exchange
            bucket.gradients.copy_(...)                      # decode

    HOOKS = {"my-compressor": MyCompressor}

Each module of this package names its hooks in `HOOKS`, so a new compressor is one new module. In a
group of one rank no hook is called.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Collectives, Work
from zero.layout import Bucket
from zero.precision import check_travel_dtype


@dataclass(frozen=True)
class ReducibleBucket:
    """A full bucket, ready to be reduced over a group of ranks."""

    index: int  # of the bucket: the same in every step and on every rank
    layout: Bucket
    gradients: Tensor  # flat, layout.numel elements of layout.dtype; the hook overwrites it
    collectives: Collectives  # the group
    sharded: bool  # whether only this rank's shard of the sum is needed

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
    """Base class of communication hooks, which may have a state of their own on every rank."""

    # The dtype in which sums travel, None for their own. With fp16 the optimizer scales gradients
    # so that a sum over ranks is no larger than a rank's gradient times the number of ranks.
    wire_dtype: torch.dtype | None = None

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start to sum a bucket over its group, in place. Collective.

        When the work has finished, `bucket.shard` holds the sum, with the same bits on every rank
        that needs them. The gradients belong to the work until then. A hook that launches further
        collectives once the first has finished returns a `ChainedWork`.
        """
        raise NotImplementedError

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


def names() -> list[str]:
    """Return the names of all hooks; imports the modules of this package."""
    return sorted(_hooks())


def make_hook(hook: str | CommHook | None, wire_dtype: torch.dtype | None = None) -> CommHook:
    """Return a hook by name, or as it is; by default the one that casts to a wire dtype.

    Raises ValueError for an unknown name or wire dtype, and for a wire dtype beside a hook.
    """
    check_travel_dtype("wire_dtype", wire_dtype)
    if hook is None:
        by_dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        hook = by_dtype[wire_dtype] if wire_dtype else "uncompressed"
    elif wire_dtype not in (None, torch.float32):
        raise ValueError("a communication hook decides the wire dtype: give one of the two")
    if not isinstance(hook, str):
        return hook
    if hook not in (hooks := _hooks()):
        raise ValueError(f"comm_hook {hook!r} is unknown: choose one of {', '.join(sorted(hooks))}")
    return hooks[hook]()


def _hooks() -> dict[str, Callable[[], CommHook]]:
    """Return the factory of each hook, by name, from the `HOOKS` of the modules of this package."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    return {name: make for module in modules for name, make in module.HOOKS.items()}


def saved_hook_state(hook: CommHook, group: Collectives, plan: Sequence[Bucket]) -> dict[str, Any]:
    """Return a hook's state with what it depends on: the rank, the size and the buckets."""
    return {"context": _hook_context(hook, group, plan), "state": hook.state_dict()}


def restore_hook_state(
    hook: CommHook, group: Collectives, plan: Sequence[Bucket], saved: dict[str, Any] | None
) -> None:
    """Restore what `saved_hook_state` returned; warn if its hook, size or buckets differ."""
    if saved is None or not saved["state"]:
        return
    if saved["context"] == _hook_context(hook, group, plan):
        hook.load_state_dict(saved["state"])
    elif group.rank == 0:
        warnings.warn(
            "the state is of another comm_hook, size or layout: the hook starts anew", stacklevel=2
        )


def _hook_context(hook: CommHook, group: Collectives, plan: Sequence[Bucket]) -> list[Any]:
    return [type(hook).__name__, group.rank, group.size, [bucket.numel for bucket in plan]]
