"""The asynchronous collectives of a world: handed to the communication thread, waited for here."""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mntrain.comm.algorithms.chunk_plan import HierarchyPlan, world_slots
from mntrain.comm.algorithms.selection import ALGORITHMS, AlgorithmTable
from mntrain.comm.buffers import BufferPool
from mntrain.comm.chunked import ChunkedCollective, DeviceContext
from mntrain.comm.collective_call import CollectiveCall, CollectiveContext, Verb
from mntrain.comm.cuda_aware import DeviceAccess, DeviceAdder, SideStream
from mntrain.comm.device_copy import DeviceCopy
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.intranode import CommTools, no_fence
from mntrain.comm.mpi import Communicator
from mntrain.comm.nccl import NodeFirstCollectives
from mntrain.comm.pending import Future, Operation
from mntrain.comm.reduction import HostAdder
from mntrain.comm.shared_flags import SharedFlags
from mntrain.comm.shared_memory import NodeSharedMemory
from mntrain.comm.small_messages import SMALL_BYTES, SmallCollective
from mntrain.comm.staging import SLOT_BYTES, HostAccess, StagedAccess, Staging, TensorAccess, chunks
from mntrain.comm.topology import Topology
from zero.collectives import CompletedWork, Work
from zero.kernels import Kernels
from zero.layout import split

# To wake a thread for less costs more than to wait for who is to wait for it.
NO_WAKE_BYTES = 128 << 10

Transport = Literal["host", "cuda-aware", "nccl"]


@dataclass(frozen=True)
class Devices:
    """What a world has whose tensors lie on devices, on some rank at least."""

    device: torch.device  # of this rank
    copier: DeviceCopy
    kernels: Kernels
    mixed: bool = False  # whether some ranks compute on the host
    slot_bytes: int = SLOT_BYTES


class WorldCollectives:
    """`zero.collectives.Collectives` over MPI: any flat tensor, in host or CUDA memory.

    `table` says by which algorithm, `transport` how tensors of devices travel: through host memory,
    from device memory by MPI, or by `node_first`; of at most `gathered_bytes`, all ranks' together,
    everyone gathers everything. Construction is collective over the world, on its
    communication thread; `node` are the ranks of this rank's node. `devices` is given by all ranks
    or by none.
    """

    def __init__(
        self,
        comm: Communicator,
        node: Communicator,
        topology: Topology,
        progress: ProgressEngine,
        devices: Devices | None = None,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.table = AlgorithmTable.always("lanes")
        self.transport: Transport = "host"
        self.node_first: NodeFirstCollectives | None = None
        self.gathered_bytes = SMALL_BYTES
        self._slots = world_slots(topology)
        self._progress = progress
        self._memory = NodeSharedMemory(node)
        owners = [0] * self.size
        for rank, slot in enumerate(self._slots):
            owners[slot] = rank
        schemes = {
            name: HierarchyPlan.of(name, topology, self.rank)
            for name in ALGORITHMS
            if name != "naive"
        }
        tools = CommTools(comm, BufferPool(), HostAdder(), no_fence)
        board = SharedFlags(self._memory, node.rank, node.size)
        self._shared = CollectiveContext(tools, schemes, board, tuple(owners))
        self._devices = devices
        if devices is not None:
            self._staging = Staging(self._memory, devices.copier, devices.slot_bytes)
            beside = SideStream(devices.copier)
            sums = DeviceAdder(devices.kernels)
            self._direct = DeviceContext(
                CommTools(comm, BufferPool(devices.device), sums, beside.fence), beside
            )

    @property
    def why_messages(self) -> str:
        """Why this node's ranks share no memory and send messages; empty where they do share."""
        return self._memory.why_not

    @property
    def shared_bytes(self) -> int:
        """Bytes that this rank has allocated in memory shared with its node."""
        return self._memory.own_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory through which this rank's GPU is reached."""
        return self._staging.nbytes if self._devices is not None else 0

    @property
    def busy_s(self) -> float:
        """Seconds in which a collective was under way, so far."""
        return self._progress.busy_s

    @property
    def waited_s(self) -> float:
        """Seconds in which callers waited for collectives, so far."""
        return self._progress.waited_s

    def using(self, table: AlgorithmTable) -> "WorldCollectives":
        """The same world's collectives, by other choices. Local."""
        other = copy.copy(self)
        other.table = table
        return other

    def slot(self, rank: int) -> int:
        """See `Collectives.slot`."""
        return self._slots[rank]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collectives.allocate`."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        return self._progress.call(lambda: self._memory.allocate(nbytes)).wait().view(dtype)

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """See `Collectives.all_reduce`."""
        return self._start("all_reduce", tensor, None, wire=wire)

    def reduce_scatter(
        self,
        tensor: Tensor,
        bounds: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
    ) -> Work:
        """See `Collectives.reduce_scatter`."""
        return self._start("reduce_scatter", tensor, bounds, wire=wire)

    def all_gather(self, tensor: Tensor, bounds: Sequence[int] | None = None) -> Work:
        """See `Collectives.all_gather`."""
        return self._start("all_gather", tensor, bounds)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """See `Collectives.broadcast`."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this world: 0 to {self.size - 1}")
        return self._start("broadcast", tensor, None, root=root)

    def _cut(self, bounds: Sequence[int] | None, numel: int) -> tuple[int, ...]:
        """The caller's bounds, in a copy that nobody changes while the collective is under way."""
        if bounds is None:
            return split(numel, self.size)
        cut = tuple(bounds)
        if (
            len(cut) != self.size + 1
            or (cut[0], cut[-1]) != (0, numel)
            or any(low > high for low, high in pairwise(cut))
        ):
            raise ValueError(
                f"bounds {cut} do not cut {numel} elements into {self.size} shards: give "
                f"{self.size + 1} indices that never decrease, from 0 to {numel}"
            )
        return cut

    def _start(
        self,
        verb: Verb,
        tensor: Tensor,
        bounds: Sequence[int] | None,
        *,
        root: int = 0,
        wire: torch.dtype | None = None,
    ) -> Work:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"a collective takes a flat contiguous tensor, not one of shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}: give the view(-1) of a "
                "contiguous one"
            )
        cut = self._cut(bounds, tensor.numel())
        if self.size == 1:
            self._progress.expect_open()
            return CompletedWork()
        nbytes = tensor.nbytes
        call = CollectiveCall(verb, self.table.of(nbytes), cut, root, wire)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self._devices is None:
            return self._submit(nbytes, call, HostAccess(tensor), None)
        if self._by_node_first(call, tensor):
            return self._node_first(call, tensor)
        parts = self._parts(call, tensor, self._devices)
        works = [self._submit(nbytes, *part) for part in parts]
        return works[0] if len(works) == 1 else CombinedWork(works)

    def _submit(
        self, nbytes: int, call: CollectiveCall, loan: TensorAccess, direct: DeviceContext | None
    ) -> Work:
        """Hand in a collective of a tensor of so many bytes, or a chunk of it."""
        operation: Operation[Work]
        small = direct is None and 0 < nbytes * self.size <= self.gathered_bytes
        if small and call.choice.algorithm != "naive":
            operation = SmallCollective(self._shared, call, loan)
        else:
            light = self._devices is None and nbytes <= NO_WAKE_BYTES
            operation = ChunkedCollective(self._shared, call, loan, direct, light=light)
        return CollectiveWork(self._progress, self._progress.submit(operation))

    def _parts(
        self, call: CollectiveCall, tensor: Tensor, devices: Devices
    ) -> Iterator[tuple[CollectiveCall, TensorAccess, DeviceContext | None]]:
        """What a collective is made of, on all ranks alike."""
        copier, mark = self._staging.mark(tensor)
        on_device = copier is devices.copier
        if on_device and self.transport == "cuda-aware" and call.choice.algorithm != "naive":
            yield call, DeviceAccess(tensor, copier, mark), self._direct
            return
        if not (on_device or devices.mixed):
            yield call, HostAccess(tensor), None
            return
        whole = call.verb in ("all_reduce", "broadcast")
        cut = chunks(call.bounds, tensor.element_size(), self._staging.slot_bytes, whole=whole)
        if not on_device and len(cut) == 1:
            yield call, HostAccess(tensor), None
            return
        goes, comes = self._copied(call)
        for chunk in cut:
            ready = copier, mark
            loan = StagedAccess(self._staging, tensor, chunk, ready=ready, goes=goes, comes=comes)
            bounds = split(chunk.bounds[-1], self.size) if whole else chunk.bounds
            yield call._replace(bounds=bounds), loan, None

    def _copied(self, call: CollectiveCall) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        """What goes to host memory, and what comes from it: shards by slot, or all (None)."""
        mine = self._slots[self.rank]
        if call.verb == "reduce_scatter":
            return None, [mine]
        if call.verb == "all_gather":
            return [mine], [slot for slot in range(self.size) if slot != mine]
        if call.verb == "broadcast":
            return (None, []) if call.root == self.rank else ([], None)
        return None, None

    def _by_node_first(self, call: CollectiveCall, tensor: Tensor) -> bool:
        return (
            self.transport == "nccl"
            and self.node_first is not None
            and self._devices is not None
            and self._devices.copier.owns(tensor)
            and call.verb in self.node_first.verbs
            and call.choice.algorithm != "naive"
        )

    def _node_first(self, call: CollectiveCall, tensor: Tensor) -> Work:
        self._progress.expect_open()
        first = self.node_first
        assert first is not None
        if call.verb == "all_reduce":
            return first.all_reduce(tensor, call.wire)
        if call.verb == "reduce_scatter":
            return first.reduce_scatter(tensor, call.bounds, call.wire)
        return first.all_gather(tensor, call.bounds)


class CollectiveWork:
    """A collective under way: first on the communication thread, then on the device."""

    def __init__(self, progress: ProgressEngine, ticket: Future[Work]) -> None:
        self._progress, self._ticket = progress, ticket

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._ticket.settled:
            self._ticket.wait().wait()
            return
        start = time.perf_counter()
        self._ticket.wait().wait()
        self._progress.waited_s += time.perf_counter() - start


class CombinedWork:
    """Several collectives as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """See `Work.wait`."""
        for work in self._works:
            work.wait()
