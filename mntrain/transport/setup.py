"""What a world's devices need, and the transport that its collectives use, as it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mntrain import transport
from mntrain.comm.collectives import Devices, WorldCollectives
from mntrain.comm.device_copy import CudaCopy, HostCopy
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology
from mntrain.transport.node_group import NodeGroupFactory
from zero.kernels import Kernels


def devices(
    kinds: Sequence[str], device: torch.device, kernels: Kernels, progress: ProgressEngine
) -> Devices | None:
    """What a rank of a world has if any rank has a GPU; `kinds` are all ranks' device types."""
    if set(kinds) == {"cpu"}:
        return None
    here = device.type == "cuda"
    if here:
        progress.prepare(lambda: torch.cuda.set_device(device))
    copier = CudaCopy(device) if here else HostCopy()
    return Devices(device, copier, kernels, mixed="cpu" in kinds)


@dataclass(frozen=True)
class SelectedTransport:
    """How tensors of GPUs travel, and why, in a line; both empty where there is no choice."""

    transport: str = ""
    line: str = ""
    near: NodeGroupFactory | None = None  # which its owner closes
    collectives: WorldCollectives | None = None


def set_up(
    wanted: str,
    *,
    world: Communicator,
    node: Communicator,
    topology: Topology,
    progress: ProgressEngine,
    collectives: WorldCollectives,
    devices: Devices | None,
    gpus: Sequence[str],
    library: str,
    bucket_bytes: int,
) -> SelectedTransport:
    """Let collectives use the transport that is wanted, or the best. Collective.

    `gpus` and `library` as in `transport.Site`. Raises UnusableError, the same on all ranks.
    """
    if devices is None:
        if wanted in ("cuda-aware", "nccl"):
            raise transport.UnusableError(
                f"transport {wanted}: no rank of this job has a GPU; choose auto or host"
            )
        return SelectedTransport()
    if world.size == 1:
        return SelectedTransport()
    near = NodeGroupFactory(world, node, topology, progress, devices)
    site = transport.Site(
        world,
        topology,
        progress,
        collectives,
        devices,
        gpus=gpus,
        library=library,
        near=near,
        tensor=lambda numel: torch.zeros(numel, device=devices.device),
    )
    try:
        line = transport.choose(site, wanted, bucket_bytes)
    except transport.UnusableError:
        near.close()
        raise
    concern = devices.copier.concern
    line = f"{line}; {concern}" if concern else line
    return SelectedTransport(site.collectives.transport, line, near, site.collectives)
