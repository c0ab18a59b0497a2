"""Communication hooks that were written for torch's DistributedDataParallel.

    dist.init_process_group("gloo", init_method=..., rank=world.rank, world_size=world.size)
    state = PowerSGDState(process_group=None, matrix_approximation_rank=4)
    world.optimizer(model, torch.optim.AdamW, comm_hook=DDPHook(state, powerSGD_hook), lr=1e-3)

Such a hook communicates through a process group of torch.distributed, which the user makes beside
the world, over the same ranks. Its traffic crosses nodes as the group's backend decides, and is not
in mntrain's counts.

Source of the interface: torch.distributed.GradBucket and torch's "DDP Communication Hooks".
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.futures import Future

from zero.collectives import Work
from zero.comm_hooks import CommHook, NodeLevels, ReducibleBucket
from zero.kernels import view


class DDPBucket:
    """A bucket with the methods of torch.distributed.GradBucket."""

    def __init__(self, bucket: ReducibleBucket) -> None:
        self._bucket, self._buffer = bucket, bucket.gradients

    def index(self) -> int:
        """Return the number of the bucket, the same in every step."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the flat gradients."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat gradients, as hooks do that cast them."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return a view of the flat gradients for each parameter, in its shape."""
        entries = self._bucket.layout.entries
        return [
            view(self._buffer, entry.start, parameter)
            for entry, parameter in zip(entries, self.parameters(), strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return [self._bucket.parameters[e.spec.name] for e in self._bucket.layout.entries]

    def is_last(self) -> bool:
        """Return whether no bucket follows in this backward."""
        return self._bucket.last


class DDPHook(CommHook):
    """Calls `hook(state, bucket)`, which returns a future of the mean over ranks, as under DDP.

    The gradients in a bucket are weighted by samples, so a state with error feedback, such as
    PowerSGD's, is exact for batches of one size, without dynamic loss scaling and skipped steps:
    only the hooks of this package learn of those. The state is not in checkpoints; save it with
    other objects. At stages 1 and 2 the whole mean arrives, of which a rank uses its shard.

    Backward waits for each bucket: a hook of several collectives, such as torch's PowerSGD, starts
    the later ones in a thread of the process group, so that those of two buckets may come in
    another order on another rank.
    """

    world_only = True

    def __init__(
        self, state: Any, hook: Callable[[Any, Any], Future[Tensor] | Future[list[Tensor]]]
    ) -> None:
        if not callable(hook):
            raise TypeError(
                f"the hook of DDPHook is {hook!r}: give DDPHook(state, hook), in this order"
            )
        self._state, self._hook = state, hook

    def bind(self, size: int, levels: NodeLevels | None, *, scheduled: bool) -> None:
        """Raise ValueError if the process group of the state has another number of ranks, too."""
        import torch.distributed as dist  # noqa: PLC0415 - takes a tenth of a second

        group = getattr(self._state, "process_group", self._state)
        known = group is None or isinstance(group, dist.ProcessGroup)  # else the hook knows it
        if known and (ranks := dist.get_world_size(group)) != size:
            raise ValueError(f"the process group of DDPHook has {ranks} ranks, and this one {size}")
        super().bind(size, levels, scheduled=scheduled)

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Call the hook, and turn its mean into a sum when it has arrived."""

        def write_sum(future: Future[Any]) -> None:
            value = future.value()
            mean = value if isinstance(value, Tensor) else value[0]
            bucket.gradients.copy_(mean).mul_(bucket.collectives.size)

        future: Any = self._hook(self._state, DDPBucket(bucket))
        work: Work = future.then(write_sum)
        work.wait()
        return work
