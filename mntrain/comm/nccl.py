"""Collectives of GPU tensors that stay on the GPUs within a node: NCCL there, MPI between nodes.

    all-reduce       exchange lanes, add | all-reduce of the own lane     | exchange sums
    reduce-scatter   exchange lanes, add | reduce-scatter of the own lane |
    all-gather       (one node only)                                      | exchange shards

NCCL only moves bytes, in torch's `ProcessGroupNCCL.alltoall`. The owner of a lane adds it in the
order of local ranks, in fp32 or wider. So sums have the same bits by every transport and at every
ZeRO stage, which NCCL's own reductions do not promise. All nodes have equally many ranks.

On one node, all work is given to the GPU when a collective starts, and so in one order on all
ranks. On several nodes, the last exchange of an all-reduce starts when a caller waits for it, and
so all ranks have to start and to wait in one order. An all-gather goes through host memory there,
because each rank waits for it at a time of its own.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mntrain.comm.mpi import Communicator
from mntrain.comm.staging import DeviceCopy, StreamOrderedWork
from zero.collectives import Collectives, CompletedWork, Work
from zero.kernels import Add
from zero.layout import split

# Ranks may wait for each other for as long as they like, for instance during a checkpoint.
TIMEOUT = timedelta(days=30)


class NodeFirstCollectives:
    """All-reduce, reduce-scatter and all-gather of tensors on the devices of a node's ranks.

    `group` is torch's process group of the node's devices; of its methods, `rank`, `size` and
    `alltoall` of lists of tensors are used. `cross` are the collectives of the ranks with this
    local rank, ordered by node. `waiting` is the engine's. Tensors are flat and contiguous, of any
    dtype; in place.
    """

    def __init__(
        self,
        group: "torch.distributed.ProcessGroup",
        cross: Collectives,
        copier: DeviceCopy,
        add: Add,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._group, self._cross = group, cross
        self._copier, self._add, self._waiting = copier, add, waiting
        self._rank, self._size = group.rank(), group.size()
        self._one_node = cross.size == 1

    def start(
        self, verb: str, tensor: Tensor, bounds: Sequence[int], wire: torch.dtype | None
    ) -> Work | None:
        """Start a collective, or return None where it goes through host memory.

        Of a reduce-scatter, the other ranks' shards are overwritten. Slots are ordered by local
        rank, then by node: the shards of a lane are contiguous.
        """
        nodes = self._cross.size
        if verb == "all_reduce":
            lanes = split(len(tensor), self._size)
            return self._start(
                tensor, lanes, lambda lane: self._cross.all_reduce(lane, wire), gather=True
            )
        if verb == "reduce_scatter":
            first = self._rank * nodes
            shards = [bound - bounds[first] for bound in bounds[first : first + nodes + 1]]
            return self._start(
                tensor,
                bounds[::nodes],
                lambda lane: self._cross.reduce_scatter(lane, shards, wire),
                gather=False,
            )
        if verb == "all_gather" and self._one_node:
            return self._start(tensor, bounds, None, gather=True)
        return None

    def _start(
        self,
        tensor: Tensor,
        bounds: Sequence[int],
        exchange: Callable[[Tensor], Work] | None,
        *,
        gather: bool,
    ) -> Work:
        """Sum lanes within the node and start the exchange between nodes, on the side stream.

        `exchange` is None for a collective without sums; `gather` says that every rank gets every
        lane at the end.
        """
        if not len(tensor):
            return CompletedWork()
        lanes = [tensor[low:high] for low, high in pairwise(bounds)]
        work: Work | None = None
        ready = self._copier.record_event()
        with self._copier.side_stream():
            self._copier.wait_on_stream(ready)
            self._copier.record_stream(tensor)
            if exchange is not None:
                self._sum_own_lane(lanes)
                work = exchange(lanes[self._rank])

        @cache
        def finish() -> torch.cuda.Event:
            with self._copier.side_stream():
                if work is not None:
                    work.wait()
                if gather:
                    self._exchange(lanes, [lanes[self._rank]] * self._size)
                return self._copier.record_event()

        if self._one_node:
            finish()
        before = [] if work is None else [work]
        return StreamOrderedWork(self._copier, self._waiting, lambda: [finish()], before)

    def _sum_own_lane(self, lanes: Sequence[Tensor]) -> None:
        """Receive this rank's lane from all ranks of the node and add it up in place."""
        own = lanes[self._rank]
        addends = [
            own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)
        ]
        self._exchange(addends, lanes)
        self._add(addends, own)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Send `inputs[i]` to rank i of the node and receive `outputs[i]` from it."""

        def as_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
            views = [tensor.view(torch.uint8) for tensor in tensors]  # NCCL lacks some dtypes
            views[self._rank] = views[self._rank][:0]  # a rank sends itself nothing
            return views

        self._group.alltoall(as_bytes(outputs), as_bytes(inputs)).wait()


def connect(node: Communicator, device: torch.device) -> Any:
    """Return torch's NCCL process group of a node's GPUs, for `use`. Collective over the node.

    Blocks. Every rank has a GPU of its own. The ranks find each other over MPI; torch's default
    process group is not used. Raises RuntimeError where torch has no NCCL or a rank cannot join.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        raise RuntimeError("this build of torch has no NCCL")
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    store, file = shared_store(node)
    try:
        group = nccl(store, node.rank, node.size, options)
    except BaseException:
        os.close(file)
        raise
    weakref.finalize(group, os.close, file)
    return group


def use(group: "torch.distributed.ProcessGroup", device: torch.device) -> None:
    """Use a group that all ranks of the node have, at which NCCL connects them. Collective; blocks.

    Raises RuntimeError where they cannot connect.
    """
    token = torch.zeros(group.size(), dtype=torch.uint8, device=device)
    sent = list(torch.zeros_like(token).split(1))
    group.alltoall(list(token.split(1)), sent).wait()
    torch.cuda.synchronize(device)


def shared_store(node: Communicator) -> tuple[Any, int]:
    """Return a store of the node's ranks, and the descriptor to close when it is used no more.

    Collective over the node; blocks. The store is a file in the leader's memory, which opens no
    port. Raises RuntimeError on all ranks where the ranks of a node cannot open it.
    """
    file, error = -1, ""
    if node.rank == 0:
        try:
            file = os.memfd_create("mntrain store", os.MFD_CLOEXEC)
        except (AttributeError, OSError) as failure:
            error = str(failure)
    offer = (os.getpid(), file, _identity(file), error)
    pid, of_leader, identity, error = node.gather(offer)[0]
    if not error and node.rank > 0:
        try:
            file = os.open(f"/proc/{pid}/fd/{of_leader}", os.O_RDWR | os.O_CLOEXEC)
            if _identity(file) != identity:
                error = "its file is another process's"
        except OSError as failure:
            error = str(failure)
    errors = node.gather(error)
    if not any(errors):
        make: Any = torch.distributed.FileStore  # type: ignore[attr-defined] # exported at run time
        return make(f"/proc/self/fd/{file}", node.size), file
    if file >= 0:
        os.close(file)
    raise RuntimeError(f"the ranks of the node cannot share a store: {next(filter(None, errors))}")


def _identity(file: int) -> tuple[int, int]:
    """Return what tells an open file from all others of this machine."""
    if file < 0:
        return -1, -1
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def close(group: "torch.distributed.ProcessGroup") -> None:
    """Free a process group after all of its work. Collective over the node."""
    shutdown = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)
    if shutdown is not None:  # the name depends on torch's version
        shutdown()
