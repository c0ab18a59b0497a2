"""Selection of the transport: how tensors on GPUs travel.

    host         through pinned host memory that the node's ranks share; works with every MPI
    cuda-aware   MPI sends and receives device memory
    nccl         NCCL within the node, host memory between nodes

`auto` is nccl where every rank has a GPU of its own, nodes have equally many ranks and torch has
NCCL; it is host everywhere else.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch

from mntrain.comm import nccl
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.collectives import Devices, Transport, WorldCollectives
from mntrain.comm.device_copy import CudaCopy, HostCopy
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.probe_process import probe_device_memory
from mntrain.comm.topology import Topology
from zero.kernels import Kernels

T = TypeVar("T")

TRANSPORTS: tuple[Transport, ...] = ("host", "cuda-aware", "nccl")


class TransportError(ValueError):
    """The requested transport does not work in this job. All ranks raise it alike."""


@dataclass(frozen=True)
class TransportContext:
    """The parts of a world that a transport is selected for.

    `devices` is None where no rank has a GPU; `gpus` names each rank's GPU, by rank, "" where it
    has none. Tests replace `connect` and `probe`.
    """

    world: Communicator
    node: Communicator
    topology: Topology
    progress: ProgressEngine
    devices: Devices | None
    gpus: Sequence[str]
    connect: Callable[[Communicator, torch.device], Any] = nccl.connect
    probe: Callable[[str], str] = probe_device_memory

    def run(self, function: Callable[[], T]) -> T:
        """Call a function on the communication thread and return its result."""
        return self.progress.call(function).wait()

    def first_reason(self, reason: str) -> str:
        """Return the first rank's non-empty reason, with the rank, or "". Collective."""
        reasons = self.run(lambda: self.world.gather_objects(reason))
        failed = [rank for rank, text in enumerate(reasons) if text]
        if not failed:
            return ""
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return f"rank {failed[0]}{others}: {reasons[failed[0]]}"


@dataclass(frozen=True)
class SelectedTransport:
    """The transport of a world, with a one-line explanation; "" where there is nothing to choose.

    `node_first` is set for nccl. The owner calls `close`.
    """

    name: Transport | Literal[""] = ""
    line: str = ""
    node_first: nccl.NodeFirstCollectives | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Free NCCL's group and the communicators between nodes. Collective."""
        self.resources.close()


def expect_known(name: str) -> None:
    """Raise ValueError unless `name` is auto or a transport."""
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport {name!r} is unknown: choose auto, {', '.join(TRANSPORTS)}")


def make_devices(
    types: Sequence[str], device: torch.device, kernels: Kernels, progress: ProgressEngine
) -> Devices | None:
    """Return this rank's device, its copies and kernels; None if no rank has a GPU.

    `types` are all ranks' device types, `device` is that of this rank.
    """
    if set(types) == {"cpu"}:
        return None
    if device.type == "cuda":
        progress.prepare(lambda: torch.cuda.set_device(device))
        return Devices(device, CudaCopy(device), kernels, mixed="cpu" in types)
    return Devices(device, HostCopy(), kernels, mixed="cpu" in types)


def select_transport(requested: str, context: TransportContext) -> SelectedTransport:
    """Return the requested transport, ready for use, or the one that `auto` selects. Collective.

    Raises TransportError, the same on all ranks, if the requested transport cannot work here.
    """
    if context.devices is None:
        if requested in ("cuda-aware", "nccl"):
            raise TransportError(
                f"transport {requested}: no rank of this job has a GPU; choose auto or host"
            )
        return SelectedTransport()
    if context.world.size == 1:
        return SelectedTransport()
    reason, resources = "", ExitStack()
    if requested == "cuda-aware":
        reason = _why_not_cuda_aware(context)
    elif requested in ("nccl", "auto"):
        reason = why_not_nccl(context.topology, context.gpus)
        if not reason:
            node_first, reason = _connect_nccl(context, resources)
            if node_first is not None:
                why = "as requested" if requested == "nccl" else "each rank has a GPU of its own"
                return SelectedTransport("nccl", f"nccl: {why}", node_first, resources)
    if reason and requested != "auto":
        raise TransportError(
            f"transport {requested}: {reason}; choose host, which works with every MPI, or auto"
        )
    name = cast("Transport", "host" if requested == "auto" else requested)
    line = f"host; not nccl: {reason}" if reason else f"{name}: as requested"
    return SelectedTransport(name, line)


def why_not_nccl(topology: Topology, gpus: Sequence[str]) -> str:
    """Return why the GPUs of the nodes, named by rank, cannot use NCCL; "" if they can."""
    if not all(gpus):
        return f"rank {list(gpus).index('')} has no GPU"
    sizes = {len(node) for node in topology.nodes}
    if sizes == {1}:
        return "every node has one rank only"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    for node in topology.nodes:
        for rank in node:
            sharing = [other for other in node if other < rank and gpus[other] == gpus[rank]]
            if sharing:
                return f"rank {sharing[0]} and rank {rank} share a GPU, which NCCL does not allow"
    return ""


def _why_not_cuda_aware(context: TransportContext) -> str:
    """Return why MPI cannot use device memory here; "" if it can. Collective."""
    assert context.devices is not None
    if not all(context.gpus):
        return f"rank {list(context.gpus).index('')} has no GPU"
    # The leaders probe for their nodes, whose ranks have the same MPI.
    leader = context.topology.local_rank(context.world.rank) == 0
    return context.first_reason(context.probe(str(context.devices.device)) if leader else "")


def _connect_nccl(
    context: TransportContext, resources: ExitStack
) -> tuple[nccl.NodeFirstCollectives | None, str]:
    """Connect the GPUs of each node and the nodes' lanes. Collective.

    Return the collectives, whose resources are added to `resources`, or the reason of the failure.
    """
    devices = context.devices
    assert devices is not None
    group: Any = None
    reason = ""
    try:
        group = context.run(lambda: context.connect(context.node, devices.device))
        resources.callback(nccl.close, group)
    except Exception as error:  # NCCL and its loader raise various types; all ranks must learn
        reason = str(error) or type(error).__name__
    reason = context.first_reason(reason)
    if reason:
        resources.close()
        return None, reason
    rank, topology, world = context.world.rank, context.topology, context.world

    def split() -> tuple[Communicator, Communicator]:
        cross = world.split(topology.local_rank(rank), topology.node(rank), "cross")
        cross.traffic = world.traffic
        return cross, world.split(rank, 0, "alone")

    cross, alone = context.run(split)
    resources.callback(lambda: context.run(cross.free))
    resources.callback(lambda: context.run(alone.free))
    nodes = Topology(tuple((node,) for node in range(len(topology.nodes))))
    choice = AlgorithmChoice("flat")
    collectives = context.run(
        lambda: WorldCollectives(cross, alone, nodes, context.progress, devices, choice=choice)
    )
    copier, kernels = devices.copier, devices.kernels
    return nccl.NodeFirstCollectives(group, collectives, copier, kernels), ""
