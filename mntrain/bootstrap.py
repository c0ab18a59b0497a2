"""Construction of a world over the ranks of a communicator, in named steps.

MPI -> topology -> devices -> threads -> engine -> transport -> collectives -> placements

Every step is collective. `bootstrap` can be called again over a smaller communicator, for example
after a world was abandoned because a rank was lost.
"""

import math
import os
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from mntrain import device
from mntrain.comm import autotune, mpi, transport
from mntrain.comm.algorithms import AlgorithmChoice, check_name
from mntrain.comm.collectives import Devices, Transport, WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.topology import Topology
from mntrain.comm.transport import SelectedTransport
from mntrain.errors import AgreedError, ExceptionWatch, agreement, expect_same
from mntrain.kernels import DeviceKernels
from mntrain.rank_info import Place
from zero.layout import MIB

if TYPE_CHECKING:
    from mpi4py import MPI

# Dtypes in which gradients or updated parameters travel; None: their own.
TRAVEL_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class WorldSettings:
    """Arguments of `mntrain.init`; all ranks give equal values, except for `device`."""

    device: str = "auto"
    algorithm: str = "auto"
    bucket_mb: float = 25.0
    ranks_per_node: int | None = None
    tune: bool = True
    wire_dtype: str = "fp32"
    gather_dtype: str = "fp32"
    transport: str = "auto"

    @property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket in bytes."""
        return int(self.bucket_mb * MIB)

    def check(self) -> None:
        """Raise ValueError for a value outside the allowed ones. Local."""
        if self.algorithm != "auto":
            check_name(self.algorithm)
        if not 1 / MIB <= self.bucket_mb < math.inf:
            raise ValueError(f"bucket_mb is {self.bucket_mb}: a bucket must hold at least one byte")
        for name in ("wire_dtype", "gather_dtype"):
            if (dtype := getattr(self, name)) not in TRAVEL_DTYPES:
                raise ValueError(f"{name} {dtype!r} is unknown: choose {', '.join(TRAVEL_DTYPES)}")
        transport.expect_known(self.transport)


@dataclass
class WorldParts:
    """The parts of a world: filled in by the steps of `bootstrap`, then constant."""

    settings: WorldSettings
    comm: mpi.Communicator
    library: mpi.MpiLibrary
    watch: ExceptionWatch
    resources: ExitStack  # frees the parts, collectively
    hosts: list[int] = field(init=False)  # a key of each rank's host, by rank
    topology: Topology = field(init=False)
    node: mpi.Communicator = field(init=False)  # over this rank's node group
    gpus: list[str] = field(init=False)  # identifier of each rank's GPU, by rank; empty for a CPU
    device: torch.device = field(init=False)
    sharing: str = field(init=False)  # warning about GPUs that several ranks share, or empty
    kernels: DeviceKernels = field(init=False)
    engine: ProgressEngine = field(init=False)
    devices: Devices | None = field(init=False)
    collectives: WorldCollectives = field(init=False)
    transport: SelectedTransport = field(init=False)
    tuning: str = ""  # the tuned algorithm and the reason, in one line; empty if not tuned
    places: list[Place] = field(init=False)
    groups: ExitStack = field(default_factory=ExitStack)  # frees the communicators of groups


def bootstrap(comm: "MPI.Intracomm | None", settings: WorldSettings) -> WorldParts:
    """Start MPI if necessary, and build a world over `comm` (default: all ranks). Collective.

    `comm` is duplicated and stays the caller's. Raises AgreedError on all ranks for an argument
    that any of them cannot accept, with everything freed, and mpi.SilentSingletonsError if the
    launcher started more ranks than MPI sees. Any other exception leaves an ExceptionWatch
    installed, which ends the job if nobody catches the exception.
    """
    world, library = mpi.start(comm)
    watch = ExceptionWatch(world.rank, world.size, socket.gethostname())
    watch.install()
    resources = ExitStack()
    resources.callback(watch.uninstall)
    resources.callback(world.free)
    parts = WorldParts(settings, world, library, watch, resources)
    resources.enter_context(parts.groups)
    try:
        for step in STEPS:
            step(parts)
    except AgreedError:
        resources.close()
        watch.install()  # lets rank 0 alone print the error if nobody catches it
        raise
    return parts


def _find_topology(parts: WorldParts) -> None:
    """Check the settings on all ranks, and group the ranks by node."""
    comm, settings = parts.comm, parts.settings
    parts.hosts = comm.node_keys()
    with agreement(comm.gather_objects, comm.rank):
        settings.check()
        parts.topology = Topology.from_hosts(parts.hosts, settings.ranks_per_node)
    compared = {**asdict(settings), "device": None}  # devices may differ
    expect_same(comm.gather_objects(compared), comm.rank)
    group = parts.topology.node_group(comm.rank)
    node, local_rank = parts.topology.node(comm.rank), parts.topology.local_rank(comm.rank)
    parts.node = comm.split(node, local_rank, "node")
    parts.resources.callback(parts.node.free)
    comm.levels = ["node" if rank in group else "cross" for rank in range(comm.size)]


def _assign_devices(parts: WorldParts) -> None:
    """Distribute the GPUs of every host over its ranks."""
    comm = parts.comm
    with agreement(comm.gather_objects, comm.rank):
        visible = device.visible_gpus(parts.settings.device)
    visible_gpus, host_names = comm.gather_objects(visible), comm.gather_objects(parts.watch.host)
    with agreement(comm.gather_objects, comm.rank):
        indices = device.assign(parts.hosts, visible_gpus)
    parts.gpus = [
        "" if index is None else names[index]
        for index, names in zip(indices, visible_gpus, strict=True)
    ]
    parts.sharing = device.sharing(parts.hosts, host_names, parts.gpus)
    index = indices[comm.rank]
    parts.device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if parts.device.type == "cuda":
        torch.cuda.set_device(parts.device)
    parts.kernels = DeviceKernels(parts.device)


def _set_threads(parts: WorldParts) -> None:
    """Give torch this rank's share of the host's cores, unless OMP_NUM_THREADS is set."""
    own_cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores_by_rank = parts.comm.gather_objects(own_cores)
    if not own_cores or "OMP_NUM_THREADS" in os.environ:
        return
    host = parts.hosts[parts.comm.rank]
    users = [cores for cores, key in zip(cores_by_rank, parts.hosts, strict=True) if key == host]
    share = sum(1 / sum(core in cores for cores in users) for core in own_cores)
    torch.set_num_threads(max(1, int(share)))


def _start_engine(parts: WorldParts) -> None:
    """Start the communication thread, which makes all MPI calls from here on."""
    parts.engine = ProgressEngine()
    parts.resources.callback(parts.engine.close)
    parts.devices = transport.make_devices(parts.device, parts.kernels, parts.engine)


def _select_transport(parts: WorldParts) -> None:
    """Choose how tensors on GPUs travel."""
    context = transport.TransportContext(
        parts.comm, parts.node, parts.topology, parts.engine, parts.devices, parts.gpus
    )
    try:
        parts.transport = transport.select_transport(parts.settings.transport, context)
    except transport.TransportError as error:
        raise AgreedError(str(error), parts.comm.rank) from None
    parts.resources.callback(parts.transport.close)


def _make_collectives(parts: WorldParts) -> None:
    """Make the collectives, with the algorithm that is set or the one that is fastest here."""
    settings, selected = parts.settings, parts.transport

    def make(comm: mpi.Communicator) -> WorldCollectives:
        return WorldCollectives(
            comm,
            parts.node,
            parts.topology,
            parts.engine,
            parts.devices,
            transport=selected.name or "host",
            node_first=selected.node_first,
        )

    parts.collectives = parts.engine.call(lambda: make(parts.comm)).wait()
    algorithm = "lanes" if settings.algorithm == "auto" else settings.algorithm
    if settings.algorithm == "auto" and parts.comm.size > 1 and selected.name != "nccl":
        parts.tuning = "lanes: not tuned"
        if settings.tune:
            nodes = parts.topology.nodes
            algorithm, parts.tuning = autotune.tune(
                make,
                parts.comm,
                parts.engine,
                parts.device,
                bucket_bytes=settings.bucket_bytes,
                facts=(parts.watch.host, parts.library.name, selected.name, nodes),
            )
    parts.collectives = parts.collectives.replace(choice=AlgorithmChoice(algorithm))


def make_group_collectives(parts: WorldParts, level: Literal["node", "cross"]) -> WorldCollectives:
    """Make collectives over this rank's node or cross group. Collective over the world.

    All messages count for `level`. Tensors on GPUs are staged in host memory where the world's go
    through NCCL.
    """
    rank, topology = parts.comm.rank, parts.topology
    group = topology.node_group(rank) if level == "node" else topology.cross_group(rank)
    node = parts.node if level == "node" else _split(parts, rank, "self")
    comm = _split(parts, group[0], f"{level} group")
    comm.traffic, comm.levels = parts.comm.traffic, [level] * comm.size
    ranks = tuple(range(comm.size))
    own = Topology((ranks,) if level == "node" else tuple((r,) for r in ranks))
    choice, selected = parts.collectives.choice, parts.collectives.transport
    transport: Transport = "host" if selected == "nccl" else selected
    return parts.engine.call(
        lambda: WorldCollectives(
            comm, node, own, parts.engine, parts.devices, choice=choice, transport=transport
        )
    ).wait()


def _split(parts: WorldParts, color: int, name: str) -> mpi.Communicator:
    """Return a communicator over the ranks of one color, in the world's order. Collective."""
    comm = parts.engine.call(lambda: parts.comm.split(color, parts.comm.rank, name)).wait()
    parts.groups.callback(comm.free)
    return comm


def _gather_places(parts: WorldParts) -> None:
    """Gather the place of every rank on all ranks."""
    rank, on_gpu = parts.comm.rank, parts.device.type == "cuda"
    place = Place(
        rank,
        parts.watch.host,
        parts.topology.node(rank),
        parts.topology.local_rank(rank),
        str(parts.device),
        torch.get_num_threads(),
        parts.gpus[rank],
        torch.cuda.get_device_name(parts.device) if on_gpu else "",
    )
    parts.places = parts.engine.call(lambda: parts.comm.gather_objects(place)).wait()


STEPS = (
    _find_topology,
    _assign_devices,
    _set_threads,
    _start_engine,
    _select_transport,
    _make_collectives,
    _gather_places,
)
