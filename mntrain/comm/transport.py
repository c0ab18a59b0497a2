"""Selection of the transport: how tensors on GPUs travel.

    host         through pinned host memory that the node's ranks share; works with every MPI
    cuda-aware   MPI sends and receives device memory
    nccl         NCCL within the node, host memory between nodes

`auto` is nccl if every rank has a GPU of its own, nodes have equally many ranks, two or more, and
torch has NCCL; otherwise it is host. Build flags do not prove that an MPI library is CUDA-aware: a
child process, which may crash, tries it.

    python -m mntrain.comm.transport DEVICE     (that child process)
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple, TypeVar

import torch

from mntrain.comm import mpi, nccl
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.resources import as_bytes
from mntrain.comm.staging import DeviceCopy
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.comm.topology import Topology
from mntrain.comm.world_collectives import Transport, WorldCollectives

T = TypeVar("T")
PROBE = (sys.executable, "-m", "mntrain.comm.transport")
PROBE_S = 60.0
PROBE_SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes: an MPI has several protocols
# Variables that launchers set for their ranks; with them the child would join the job's world.
LAUNCHER_VARIABLES = re.compile(
    "PMI|PRTE_|SLURM_|HYDRA|HYDI_|MPI_LOCAL|MV2_|PALS_|ALPS_"
    # A user's settings for Open MPI begin with OMPI_MCA_, but mpirun sets a few of these as well.
    "|OMPI_(?!MCA_)|OMPI_MCA_(orte|ess|pmix|prte|initial_wdir)"
)


def probe_device_memory(
    device: str, command: Sequence[str] = PROBE, timeout_s: float = PROBE_S
) -> str:
    """Return why the MPI of this rank cannot use memory of a device; "" if it can. Local."""
    try:
        child = subprocess.run(
            [*command, device],
            env=child_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the test of its MPI with device memory failed: {error}"
    done = [line for line in child.stdout.splitlines() if line.isdigit()]
    if child.returncode == 0 and len(done) == len(PROBE_SIZES):
        return ""
    last_line = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        f"its MPI fails with device memory, after messages of {', '.join(done) or 'no'} bytes: "
        f"exit code {child.returncode}, {last_line}"
    )


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which MPI starts a world of one, with the user's MPI settings."""
    return {
        name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.match(name)
    }


def send_to_self(device: torch.device) -> None:
    """Send messages in memory of a device from this process to itself, and print their sizes.

    Starts MPI. Exits with a message if other bytes arrive.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world, _ = mpi.start()
    for nbytes in PROBE_SIZES:
        sent = torch.arange(nbytes, device=device).to(torch.uint8)
        arrived = torch.zeros_like(sent)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # MPI does not wait for kernels
        requests = world.receive(0, as_bytes(arrived)), world.send(0, as_bytes(sent))
        mpi.Requests.of(*requests).wait()
        if not torch.equal(arrived, sent):
            sys.exit(f"a message of {nbytes} bytes arrives with other bytes")
        print(nbytes, flush=True)


class TransportContext(NamedTuple):
    """The parts of a world that a transport is selected for.

    `copier` is None where ranks have no GPUs; `gpus` names each rank's GPU, by rank. What a
    transport makes is freed with `resources`, collectively.
    """

    world: mpi.Communicator
    node: mpi.Communicator
    topology: Topology
    progress: ProgressEngine
    copier: DeviceCopy | None
    gpus: Sequence[str]
    resources: ExitStack


class SelectedTransport(NamedTuple):
    """The transport of a world, with a one-line explanation; "" where there is nothing to choose.

    `node_first` is set for nccl.
    """

    name: Transport | Literal[""] = ""
    line: str = ""
    node_first: nccl.NodeFirstCollectives | None = None


def select_transport(requested: str, context: TransportContext) -> SelectedTransport:
    """Return the requested transport, ready for use, or the one that `auto` selects. Collective.

    Raises ValueError, the same on all ranks, if the requested transport cannot work here.
    """
    copier = context.copier
    if copier is None and requested in ("cuda-aware", "nccl"):
        raise ValueError(
            f"transport {requested}: no rank of this job has a GPU; choose auto or host"
        )
    if copier is None or context.world.size == 1:
        return SelectedTransport()
    if requested == "host":
        return SelectedTransport("host", "host: as requested")
    node_first, reason = None, ""
    if requested == "cuda-aware":
        # The leaders probe for their nodes, whose ranks have the same MPI.
        if context.topology.local_rank(context.world.rank) == 0:
            reason = probe_device_memory(str(copier.device))
        reason = _first_reason(context, reason)
    else:
        node_first, reason = _connect_nccl(context, copier)
    if reason and requested == "auto":
        return SelectedTransport("host", f"host; not nccl: {reason}")
    if reason:
        raise ValueError(
            f"transport {requested}: {reason}; choose host, which works with every MPI, or auto"
        )
    why = "each rank has a GPU of its own" if requested == "auto" else "as requested"
    name: Transport = "cuda-aware" if node_first is None else "nccl"
    return SelectedTransport(name, f"{name}: {why}", node_first)


def why_not_nccl(topology: Topology, gpus: Sequence[str]) -> str:
    """Return why the GPUs of the nodes, named by rank, cannot use NCCL; "" if they can."""
    sizes = {len(node) for node in topology.nodes}
    if sizes == {1}:
        return "every node has one rank only"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    if any(len({gpus[rank] for rank in node}) < len(node) for node in topology.nodes):
        return "ranks of a node share a GPU, which NCCL does not allow"
    return ""


def _first_reason(context: TransportContext, own: str) -> str:
    """Return the first rank's reason that is not empty, with the rank; "" if none. Collective."""
    reasons = context.progress.call(lambda: context.world.gather(own)).wait()
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


def _attempt(context: TransportContext, function: Callable[[], T]) -> tuple[T | None, str]:
    """Call a function on the communication threads of all ranks. Collective.

    Return its result, None if it has failed here, and why it has on the first rank where it has.
    """
    result: T | None = None
    reason = ""
    try:
        result = context.progress.call(function).wait()
    except Exception as error:  # NCCL and its loader raise various types; all ranks must learn
        reason = str(error) or type(error).__name__
    return result, _first_reason(context, reason)


def _connect_nccl(
    context: TransportContext, copier: DeviceCopy
) -> tuple[nccl.NodeFirstCollectives | None, str]:
    """Connect the GPUs of each node and the nodes' lanes. Collective.

    Return the collectives, or None and why all ranks do without.
    """
    topology, world, progress = context.topology, context.world, context.progress
    if reason := why_not_nccl(topology, context.gpus):
        return None, reason
    group, reason = _attempt(context, lambda: nccl.connect(context.node, copier.device))
    if group is not None and not reason:  # else some rank would wait for others in it
        _, reason = _attempt(context, lambda: nccl.use(group, copier.device))
    if reason or group is None:
        if group is not None:
            nccl.close(group)
        return None, reason
    context.resources.callback(nccl.close, group)
    local = topology.local_rank(world.rank)

    def make() -> WorldCollectives:
        cross = world.split(local, topology.node(world.rank), "cross")
        alone = world.split(world.rank, 0, "alone")
        cross.traffic = world.traffic
        for free in (cross.free, alone.free):
            context.resources.callback(_call, progress, free)
        # Ranks of unequal local ranks sum lanes of unequal lengths: their calls are not compared.
        stream = progress.add_stream(
            f"the ranks with local rank {local}", [node[local] for node in topology.nodes]
        )
        nodes, choice = Topology.from_hosts(range(len(topology.nodes))), AlgorithmChoice("flat")
        return WorldCollectives(cross, alone, nodes, progress, copier, stream=stream, choice=choice)

    cross = progress.call(make).wait()
    waiting = progress.waiting
    return nccl.NodeFirstCollectives(group, cross, copier, copier.add, waiting), ""


def _call(progress: ProgressEngine, function: Callable[[], None]) -> None:
    """Call a function on the communication thread."""
    progress.call(function).wait()


if __name__ == "__main__":
    send_to_self(torch.device(sys.argv[1]))
