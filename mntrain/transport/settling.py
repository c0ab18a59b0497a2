"""What a world's devices need, and the transport that its collectives use, as it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mntrain import transport
from mntrain.collectives.copies import CudaCopier, HostCopier
from mntrain.collectives.progress import Progress
from mntrain.collectives.world import Devices, WorldCollectives
from mntrain.mpi import Communicator
from mntrain.topology import Topology
from mntrain.transport.near import Near
from zero.kernels import Kernels


def devices(
    kinds: Sequence[str], device: torch.device, kernels: Kernels, progress: Progress
) -> Devices | None:
    """What a rank of a world has if any rank has a GPU; `kinds` are all ranks' device types."""
    if set(kinds) == {"cpu"}:
        return None
    here = device.type == "cuda"
    if here:
        progress.prepare(lambda: torch.cuda.set_device(device))
    copier = CudaCopier(device) if here else HostCopier()
    return Devices(device, copier, kernels, mixed="cpu" in kinds)


@dataclass(frozen=True)
class Route:
    """How tensors of GPUs travel, and why, in a line; both empty where there is no choice."""

    transport: str = ""
    line: str = ""
    near: Near | None = None  # which its owner closes


def settle(
    wanted: str,
    *,
    world: Communicator,
    node: Communicator,
    topology: Topology,
    progress: Progress,
    collectives: WorldCollectives,
    devices: Devices | None,
    gpus: Sequence[str],
    library: str,
    bucket_bytes: int,
) -> Route:
    """Let collectives use the transport that is wanted, or the best. Collective.

    `gpus` and `library` as in `transport.Site`. Raises UnusableError, the same on all ranks.
    """
    if devices is None:
        if wanted in ("cuda-aware", "nccl"):
            raise transport.UnusableError(
                f"transport {wanted}: no rank of this job has a GPU; choose auto or host"
            )
        return Route()
    if world.size == 1:
        return Route()
    near = Near(world, node, topology, progress, devices)
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
    return Route(collectives.transport, f"{line}; {concern}" if concern else line, near)
