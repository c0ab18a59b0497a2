"""The asynchronous collectives of a world: validate, choose, access the tensor, submit."""

import copy
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mntrain.comm import algorithms
from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.buffers import BufferPool
from mntrain.comm.collective_call import Algorithm, CollectiveCall, Verb, WorldContext
from mntrain.comm.device_copy import DeviceCopy
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.intranode import CommContext
from mntrain.comm.mpi import Communicator
from mntrain.comm.nccl import NodeFirstCollectives
from mntrain.comm.pending import Future
from mntrain.comm.shared_flags import SharedFlags
from mntrain.comm.shared_memory import NodeSharedMemory
from mntrain.comm.small_messages import SMALL_MESSAGE_BYTES
from mntrain.comm.staging import (
    SLOT_BYTES,
    DeviceAccess,
    StagedAccess,
    Staging,
    TensorAccess,
    chunks,
    fence,
    run_on_side_stream,
)
from mntrain.comm.topology import Topology
from zero.collectives import CompletedWork, Work
from zero.kernels import Kernels, TorchKernels
from zero.layout import split

# Up to this size the engine's thread is not woken: waking it takes longer than the collective.
NO_WAKE_BYTES = 128 << 10

Transport = Literal["host", "cuda-aware", "nccl"]
Part = tuple[CollectiveCall, TensorAccess, CommContext]


@dataclass(frozen=True)
class Devices:
    """The GPU of a rank, with its copies and kernels."""

    device: torch.device
    copier: DeviceCopy
    kernels: Kernels
    slot_bytes: int = SLOT_BYTES


@dataclass(frozen=True)
class CollectiveOptions:
    """The options of `WorldCollectives`, the same on all ranks."""

    table: AlgorithmTable
    """The algorithm for each size of a tensor."""
    transport: Transport
    """How device tensors travel: staged in host memory, directly by MPI, or by `node_first`."""
    node_first: NodeFirstCollectives | None
    """The collectives of transport nccl."""
    small_message_bytes: int
    """Up to this total of all ranks' tensors, every rank gathers them all."""


class WorldCollectives:
    """`zero.collectives.Collectives` over MPI, for flat tensors in host or CUDA memory.

    Immutable: `replace` returns collectives with other options, over the same communicator and
    shared memory. Construction is collective over the world, on the engine's thread; `node` is the
    communicator of this rank's node. `devices` is given by all ranks or by none; `options` are the
    fields of `CollectiveOptions`.
    """

    def __init__(
        self,
        comm: Communicator,
        node: Communicator,
        topology: Topology,
        engine: ProgressEngine,
        devices: Devices | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._options = _options(options)
        self._engine, self._devices = engine, devices
        self._memory = NodeSharedMemory(node)
        flags = SharedFlags(self._memory, node.rank, node.size)
        self._world = WorldContext(comm, topology, flags)
        self._algorithms: dict[str, Algorithm] = {}  # those in use so far
        self._host = CommContext(comm, BufferPool(), TorchKernels().add)
        if devices is not None:
            self._staging = Staging(self._memory, devices.copier, devices.slot_bytes)
            self._device = CommContext(
                comm,
                BufferPool(devices.device),
                devices.kernels.add,
                partial(fence, devices.copier),
                partial(run_on_side_stream, devices.copier),
            )

    def replace(self, **options: Any) -> "WorldCollectives":
        """Return the same world's collectives with some of the options replaced. Local."""
        other = copy.copy(self)
        other._options = dataclasses.replace(self._options, **options)
        return other

    @property
    def table(self) -> AlgorithmTable:
        """The algorithm for each size of a tensor."""
        return self._options.table

    @property
    def transport(self) -> Transport:
        """How device tensors travel."""
        return self._options.transport

    @property
    def no_shared_memory_reason(self) -> str:
        """Why this node's ranks share no memory and send messages; empty if they share it."""
        return self._memory.why_not

    @property
    def shared_bytes(self) -> int:
        """Bytes that this rank has allocated in memory shared with its node."""
        return self._memory.own_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory in which this rank's device tensors are staged."""
        return self._staging.nbytes if self._devices is not None else 0

    @property
    def busy_s(self) -> float:
        """Seconds so far in which a collective was active."""
        return self._engine.busy_s

    @property
    def waited_s(self) -> float:
        """Seconds so far in which callers waited for collectives."""
        return self._engine.waited_s

    def slot(self, rank: int) -> int:
        """Return the slot of a rank's shard; see `Topology.slots`."""
        return self._world.topology.slots[rank]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor of zeros, on the CPU in memory shared with the node. Collective."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        return self._engine.call(lambda: self._memory.allocate(nbytes)).wait().view(dtype)

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """Start to sum a tensor over all ranks, in place. Collective."""
        return self._start("all_reduce", tensor, None, wire=wire)

    def reduce_scatter(
        self,
        tensor: Tensor,
        bounds: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
    ) -> Work:
        """Start to sum over all ranks, in place, where only this rank's shard counts. Collective.

        Raises ValueError for bounds that do not cut the tensor into `size` shards.
        """
        return self._start("reduce_scatter", tensor, bounds, wire=wire)

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """Start to copy this rank's shard to all ranks, in place. Collective.

        Raises ValueError for bounds that do not cut the tensor into `size` shards.
        """
        return self._start("all_gather", tensor, bounds)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Start to copy the root's tensor to all ranks, in place. Collective."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this world: 0 to {self.size - 1}")
        return self._start("broadcast", tensor, None, root=root)

    def _start(
        self,
        verb: Verb,
        tensor: Tensor,
        bounds: Sequence[int] | None,
        *,
        root: int = 0,
        wire: torch.dtype | None = None,
    ) -> Work:
        _check_flat(tensor)
        shard_bounds = _shard_bounds(bounds, tensor.numel(), self.size)
        self._engine.check_open()
        if self.size == 1:
            return CompletedWork()
        tensor = tensor.detach() if tensor.requires_grad else tensor
        choice = self._options.table.of(tensor.nbytes)
        algorithm = self._algorithm(choice.algorithm)
        small = 0 < tensor.nbytes * self.size <= self._options.small_message_bytes
        wakes = not small and (self._devices is not None or tensor.nbytes > NO_WAKE_BYTES)
        call = CollectiveCall(verb, choice, shard_bounds, root, wire, small, wakes)
        node_first = self._node_first(call, tensor, algorithm)
        if node_first is not None:
            return node_first
        works = [
            CollectiveWork(self._engine, self._engine.submit(algorithm.operation(*part)))
            for part in self._access(call, tensor, algorithm)
        ]
        return works[0] if len(works) == 1 else CombinedWork(works)

    def _algorithm(self, name: str) -> Algorithm:
        algorithm = self._algorithms.get(name)
        if algorithm is None:
            algorithm = self._algorithms[name] = algorithms.load(name).make(self._world)
        return algorithm

    def _access(self, call: CollectiveCall, tensor: Tensor, algorithm: Algorithm) -> Iterator[Part]:
        """Yield the collectives that one call is made of, the same on all ranks.

        A host tensor is accessed where it lies; a device tensor too if MPI takes device memory.
        Other device tensors are staged in host memory, in several chunks if they are long.
        """
        devices = self._devices
        if devices is None or not devices.copier.owns(tensor):
            yield call, TensorAccess(tensor), self._host
            return
        ready = devices.copier.record_event()
        if self._options.transport == "cuda-aware" and not algorithm.host_only:
            # Non-blocking MPI collectives on device memory crash in Open MPI.
            direct = call._replace(small=False)
            yield direct, DeviceAccess(tensor, devices.copier, ready), self._device
            return
        whole = call.verb in ("all_reduce", "broadcast")
        goes, comes = self._staged_shards(call)
        for spans in chunks(call.bounds, tensor.element_size(), devices.slot_bytes, whole=whole):
            access = StagedAccess(self._staging, tensor, spans, ready=ready, goes=goes, comes=comes)
            bounds = split(access.bounds[-1], self.size) if whole else access.bounds
            yield call._replace(bounds=bounds), access, self._host

    def _staged_shards(
        self, call: CollectiveCall
    ) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        """Return the slots to copy to host memory and those to copy back; None: all."""
        own = self.slot(self.rank)
        if call.verb == "reduce_scatter":
            return None, [own]
        if call.verb == "all_gather":
            return [own], [slot for slot in range(self.size) if slot != own]
        if call.verb == "broadcast":
            return (None, []) if call.root == self.rank else ([], None)
        return None, None

    def _node_first(
        self, call: CollectiveCall, tensor: Tensor, algorithm: Algorithm
    ) -> Work | None:
        """Start a collective by transport nccl; None where another transport is to be used."""
        first, devices = self._options.node_first, self._devices
        if self._options.transport != "nccl" or first is None or devices is None:
            return None
        if algorithm.host_only or call.verb not in first.verbs or not devices.copier.owns(tensor):
            return None
        if call.verb == "all_reduce":
            return first.all_reduce(tensor, call.wire)
        if call.verb == "reduce_scatter":
            return first.reduce_scatter(tensor, call.bounds, call.wire)
        return first.all_gather(tensor, call.bounds)


class CollectiveWork:
    """The work of one collective: first on the engine, then on the device."""

    def __init__(self, engine: ProgressEngine, future: Future[Work]) -> None:
        self._engine, self._future = engine, future

    def wait(self) -> None:
        """Return when the result may be used; see `Work.wait`."""
        if self._future.done:
            self._future.wait().wait()
            return
        start = time.perf_counter()
        self._future.wait().wait()
        self._engine.waited_s += time.perf_counter() - start


class CombinedWork:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def _options(options: dict[str, Any]) -> CollectiveOptions:
    defaults = {
        "table": AlgorithmTable.always("lanes"),
        "transport": "host",
        "node_first": None,
        "small_message_bytes": SMALL_MESSAGE_BYTES,
    }
    return CollectiveOptions(**{**defaults, **options})


def _check_flat(tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a collective takes a flat contiguous tensor, not one of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}: give the view(-1) of a "
            "contiguous one"
        )


def _shard_bounds(bounds: Sequence[int] | None, numel: int, size: int) -> tuple[int, ...]:
    """Return a copy of the caller's bounds, or those of equal shards. Raises ValueError."""
    if bounds is None:
        return split(numel, size)
    cut = tuple(bounds)
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
