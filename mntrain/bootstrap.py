"""Construction of a world over the ranks of a communicator, in named steps.

MPI -> topology -> devices -> checks and threads -> engine -> transport -> collectives -> placements

Every step is collective. After a world was abandoned, `bootstrap` can be called over fewer ranks.
"""

import math
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from mntrain import device
from mntrain.checks import all_ranks, launcher
from mntrain.checks.before_mpi import StartError
from mntrain.checks.facts import RankFacts, collect
from mntrain.checks.finding import Finding
from mntrain.comm import compression, mpi, transport
from mntrain.comm.algorithms import AlgorithmChoice, check_name
from mntrain.comm.collectives import Devices, WorldCollectives
from mntrain.comm.disagreement import DisagreementWatch
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.forked import call_in_child
from mntrain.comm.ticket import INTERNAL
from mntrain.comm.topology import Topology
from mntrain.comm.transport import SelectedTransport
from mntrain.equal_values import expect_same
from mntrain.errors import AgreedError, ExceptionWatch, RemoteRankError, agreement
from mntrain.kernels import DeviceKernels
from mntrain.rank_info import Place, Usage, device_memory, find_place, peak_memory
from mntrain.recorder.events import Recorder, pid_namespace
from mntrain.watchdog.inquiry import Member
from mntrain.watchdog.monitor import MONITORS
from mntrain.watchdog.side_channel import (
    LOST_S,
    SideChannel,
    address_towards,
    listen,
    own_addresses,
)
from mntrain.watchdog.start_timer import TIMEOUT_S, WARN_AFTER_S, is_positive, limited_start
from mntrain.watchdog.thread import Watchdog
from zero.layout import MIB

if TYPE_CHECKING:
    from mpi4py import MPI

TRAVEL_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # None: their own

REPORT_S = 5.0  # that other ranks give the one that prints why MPI cannot start


@dataclass(frozen=True)
class WorldSettings:
    """Arguments of `mntrain.init`; all ranks give equal values, except for `device`."""

    device: str = "auto"
    algorithm: str = "lanes"
    bucket_mb: float = 25.0
    ranks_per_node: int | None = None
    wire_dtype: str = "fp32"
    compress: str = "none"
    gather_dtype: str = "fp32"
    transport: str = "auto"
    timeout: float | None = TIMEOUT_S
    warn_after: float = WARN_AFTER_S
    lost_after: float = LOST_S
    tune: bool = False

    @property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket in bytes."""
        return int(self.bucket_mb * MIB)

    def check(self) -> None:
        """Raise ValueError for a value outside the allowed ones. Local."""
        check_name(self.algorithm)
        if self.tune:
            raise ValueError(
                "tune=True is no longer there: lanes is the default, algorithm= names another, and "
                "`python -m mntrain bench` compares them"
            )
        if not 1 / MIB <= self.bucket_mb < math.inf:
            raise ValueError(f"bucket_mb is {self.bucket_mb}: a bucket must hold at least one byte")
        for name in ("wire_dtype", "gather_dtype"):
            if (dtype := getattr(self, name)) not in TRAVEL_DTYPES:
                raise ValueError(f"{name} {dtype!r} is unknown: choose {', '.join(TRAVEL_DTYPES)}")
        compression.check(self.compress, self.wire_dtype)
        transport.expect_known(self.transport)
        limits = self.warn_after, 1.0 if self.timeout is None else self.timeout
        if not all(map(is_positive, limits)):
            given = f"timeout is {self.timeout}, and warn_after {self.warn_after}"
            raise ValueError(f"{given}: give seconds above 0, or timeout=None")
        if not is_positive(self.lost_after):
            raise ValueError(f"lost_after is {self.lost_after}: give seconds above 0")


@dataclass
class WorldParts:
    """The parts of a world: filled in by the steps of `bootstrap`, then constant."""

    settings: WorldSettings
    comm: mpi.Communicator
    library: mpi.MpiLibrary
    watch: ExceptionWatch
    recorder: Recorder
    resources: ExitStack  # frees the parts, collectively
    hosts: list[int] = field(init=False)  # a key of each rank's host, by rank
    topology: Topology = field(init=False)
    node: mpi.Communicator = field(init=False)  # over this rank's node group
    gpus: list[str] = field(init=False)  # identifier of each rank's GPU, by rank; empty for a CPU
    device: torch.device = field(init=False)
    met: tuple[float, float] = field(init=False)  # times around a collective, by this host's clock
    facts: list[RankFacts] = field(init=False)  # by rank
    findings: dict[str, Finding] = field(init=False)  # of the checks at the start, by name
    kernels: DeviceKernels = field(init=False)
    engine: ProgressEngine = field(init=False)
    watchdog: Watchdog = field(init=False)
    devices: Devices | None = field(init=False)
    collectives: WorldCollectives = field(init=False)
    transport: SelectedTransport = field(init=False)
    places: list[Place] = field(init=False)
    groups: ExitStack = field(default_factory=ExitStack)  # frees the communicators of groups
    optimizer_numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def usage(self) -> Usage:
        """Return the resources that this rank has used so far. Local."""
        traffic, busy_s = self.comm.traffic, self.collectives.busy_s
        return Usage(
            peak_memory=peak_memory(),
            node_messages=traffic.messages["node"],
            node_bytes=traffic.bytes["node"],
            cross_messages=traffic.messages["cross"],
            cross_bytes=traffic.bytes["cross"],
            communication_s=busy_s,
            exposed_s=min(self.collectives.waited_s, busy_s),
            pinned_memory=self.collectives.pinned_bytes,
            **device_memory(self.device),
        )


def bootstrap(comm: "MPI.Intracomm | None", settings: WorldSettings) -> WorldParts:
    """Start MPI if necessary, and build a world over `comm` (default: all ranks). Collective.

    `comm` is duplicated and stays the caller's. Raises AgreedError on all ranks for an argument
    that any of them cannot accept or a check that fails, with everything freed; also if MPI cannot
    start, or the launcher started more ranks than MPI sees. Any other exception leaves an
    ExceptionWatch installed, which ends the job if nobody catches the exception.
    """
    with ExitStack() as meeting:
        meeting.enter_context(limited_start(settings.timeout))
        world, library = start_mpi(comm)
        watch = ExceptionWatch(world.rank, world.size, socket.gethostname())
        watch.install()
        recorder = Recorder(world.rank, world.size, INTERNAL)
        call_in_child(recorder.leave_to_parent)
        watch.on_error = recorder.error_raised
        resources = ExitStack()
        for callback in (recorder.close, watch.uninstall, world.free):
            resources.callback(callback)
        parts = WorldParts(settings, world, library, watch, recorder, resources)
        resources.enter_context(parts.groups)
        try:
            for step in STEPS:
                step(parts)
                if step is _start_engine:
                    meeting.close()  # from here on the watchdog watches
        except AgreedError:
            resources.close()
            watch.install()  # lets rank 0 alone print the error if nobody catches it
            raise
        return parts


def start_mpi(
    comm: "MPI.Intracomm | None" = None,
) -> tuple[mpi.Communicator, mpi.MpiLibrary]:
    """Start MPI as `mpi.start` does. Raises AgreedError where it raises StartError."""
    try:
        return mpi.start(comm)
    except StartError as error:
        raise _agreed(error) from error


def _agreed(error: StartError) -> AgreedError:
    """Return the error of ranks that cannot communicate, which one of them reports. Local.

    It is rank 0 of the job or of the host. The others wait, since launchers end all ranks when one
    exits.
    """
    names = launcher.LOCAL_RANK_VARIABLES if error.on_host else launcher.RANK_VARIABLES
    rank = launcher.first_number(os.environ, names) or 0
    ExceptionWatch(rank, 1, socket.gethostname()).install()  # silent if nobody catches the error
    if rank:
        time.sleep(REPORT_S)
    where = f"{socket.gethostname()}: " if error.on_host else ""
    return AgreedError(f"{where}{error}", rank)


def _find_topology(parts: WorldParts) -> None:
    """Check the settings on all ranks, and group the ranks by node."""
    comm, settings = parts.comm, parts.settings
    before = time.time()
    parts.hosts = comm.node_keys()
    parts.met = before, time.time()
    mpi.unlink_segments(comm.size)
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
    visible_gpus = comm.gather_objects(visible)
    with agreement(comm.gather_objects, comm.rank):
        indices = device.assign(parts.hosts, visible_gpus)
    parts.gpus = [
        "" if index is None else names[index]
        for index, names in zip(indices, visible_gpus, strict=True)
    ]
    index = indices[comm.rank]
    parts.device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if parts.device.type == "cuda":
        torch.cuda.set_device(parts.device)
    parts.kernels = DeviceKernels(parts.device)


def _check(parts: WorldParts) -> None:
    """Gather the facts of all ranks, check them, and set the number of threads.

    Raises AgreedError for what fails.
    """
    rank = parts.comm.rank
    local = collect(
        host=parts.watch.host,
        host_key=parts.hosts[rank],
        gpu=parts.gpus[rank],
        library=parts.library.build,
        size=mpi.job_size(),
        clock=parts.met,
    )
    parts.facts = parts.comm.gather_objects(local)
    parts.findings = all_ranks.examine(parts.facts)
    findings = parts.findings.values()
    if failed := [str(finding) for finding in findings if finding.status == "fail"]:
        raise AgreedError("; ".join(failed), rank)
    if local.cores and not local.threads:
        torch.set_num_threads(all_ranks.fair_threads(parts.facts, rank))


def _start_engine(parts: WorldParts) -> None:
    """Start the communication thread, which makes all MPI calls from here on."""
    rank, comm = parts.comm.rank, parts.comm
    member = Member(parts.watch.host, parts.hosts[rank], os.getpid(), pid_namespace())
    own = member, own_addresses(), secrets.token_bytes(32)
    members, interfaces, keys = zip(*comm.gather_objects(own), strict=True)
    listener, address = None, None
    if rank in MONITORS and rank < comm.size - 1:
        others = {
            h: i for h, i in zip(parts.hosts, interfaces, strict=True) if h != member.host_key
        }
        listener, address = listen(address_towards(others.values()))
    monitors = {r: a for r, a in enumerate(comm.gather_objects(address)) if a is not None}
    parts.resources.callback(lambda: parts.watchdog.leave_world())  # noqa: PLW0108 - it is not made yet
    engine = parts.engine = ProgressEngine()
    engine.main.observer = parts.recorder
    parts.watchdog = parts.watch.others = Watchdog(
        rank,
        members,
        engine,
        timeout=parts.settings.timeout,
        warn_after=parts.settings.warn_after,
        channel=SideChannel(rank, keys[0], listener, lost_after=parts.settings.lost_after),
        monitors=monitors,
        fail=lambda report: engine.stop(RemoteRankError(**report)),
        note_end=parts.recorder.peer_ended,
    )
    engine.watch = DisagreementWatch(parts.comm, engine.streams, partial(AgreedError, rank=rank))
    parts.resources.callback(engine.close)
    parts.devices = transport.make_devices(parts.device, parts.kernels, parts.engine)
    engine.waits.copier = parts.devices.copier if parts.devices else None


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
    """Make the collectives, with the algorithm that is set."""
    settings, selected = parts.settings, parts.transport
    parts.collectives = parts.engine.call(
        lambda: WorldCollectives(
            parts.comm,
            parts.node,
            parts.topology,
            parts.engine,
            parts.devices,
            choice=AlgorithmChoice(settings.algorithm),
            transport=selected.name or "host",
            node_first=selected.node_first,
        )
    ).wait()


def _gather_places(parts: WorldParts) -> None:
    """Gather the place of every rank on all ranks."""
    rank = parts.comm.rank
    place = find_place(
        rank=rank,
        host=parts.watch.host,
        node=parts.topology.node(rank),
        local_rank=parts.topology.local_rank(rank),
        device=parts.device,
        gpu=parts.gpus[rank],
    )
    parts.places = parts.engine.call(lambda: parts.comm.gather_objects(place)).wait()


STEPS = (
    _find_topology,
    _assign_devices,
    _check,
    _start_engine,
    _select_transport,
    _make_collectives,
    _gather_places,
)
