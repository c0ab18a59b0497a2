"""The start of a world."""

from typing import TYPE_CHECKING

from mntrain.bootstrap import WorldSettings
from mntrain.checks.finding import print_warnings
from mntrain.watchdog.side_channel import LOST_S
from mntrain.watchdog.start_timer import TIMEOUT_S, WARN_AFTER_S
from mntrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


def init(
    comm: "MPI.Intracomm | None" = None,
    *,
    device: str = "auto",
    algorithm: str = "lanes",
    bucket_mb: float = 25.0,
    ranks_per_node: int | None = None,
    wire_dtype: str = "fp32",
    compress: str = "none",
    gather_dtype: str = "fp32",
    transport: str = "auto",
    timeout: float | None = TIMEOUT_S,
    warn_after: float = WARN_AFTER_S,
    lost_after: float = LOST_S,
    tune: bool = False,
) -> World:
    """Start MPI if necessary, and make a world of the ranks of `comm`. Collective.

    All arguments but `comm` and `device` must be equal on all ranks. Raises AgreedError (a
    ValueError) on all ranks for an argument that any rank cannot accept, and for a check
    (`mntrain.checks`) that fails, before MPI starts or after. Rank 0 prints their warnings.

    Args:
        comm: duplicated; stays the caller's. Default: all ranks of the job.
        device: auto, cpu or cuda. auto: cuda if there is any; then every rank needs one.
        algorithm: of all-reduces, one of `mntrain.comm.algorithms.names()`.
        bucket_mb: size of a gradient bucket in MiB.
        ranks_per_node: cut every node into virtual nodes of this many ranks.
        wire_dtype: fp32, bf16 or fp16, in which wider gradients cross nodes.
        compress: none, bf16 or int8: how gradients cross nodes. The `comm_hook` of
            optimizers that are given none.
        gather_dtype: the same for updated parameters at stages 1 and 2.
        transport: auto, host, cuda-aware or nccl, for tensors on GPUs (`mntrain.comm.transport`).
        timeout: seconds without progress that a rank waits for others, until rank 0 reports who
            waits for whom and aborts the job; a lost rank ends it at once. None: both are only
            reported.
        warn_after: the same, until rank 0 prints a warning.
        lost_after: seconds without an acknowledgement from a node, which ends when a link is up
            again, until its ranks count as lost.
        tune: only False, which scripts may still give: nothing is timed at the start any more.

    """
    settings = WorldSettings(
        device,
        algorithm,
        bucket_mb,
        ranks_per_node,
        wire_dtype,
        compress,
        gather_dtype,
        transport,
        timeout,
        warn_after,
        lost_after,
        tune,
    )
    world = World(comm, settings)
    print_warnings(world.findings.values() if world.master else ())
    return world
