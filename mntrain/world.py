"""The public facade of a job: its ranks, their devices, and their collective operations."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import nn

from mntrain import errors
from mntrain.bootstrap import TRAVEL_DTYPES, WorldSettings, bootstrap, make_group_collectives
from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.pending import Future
from mntrain.data.loader import ShardedLoader
from mntrain.errors import AgreedError
from mntrain.rank_info import Usage, device_memory, peak_memory
from zero.comm_hooks import CommHook
from zero.optimizer import ZeroOptimizer
from zero.param_groups import check_trainable, name_parameters
from zero.sync_schedule import SyncSchedule

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class World:
    """All ranks of a job. Made by `init` on all ranks together, and used as a context manager.

    Attributes, all local facts:
        rank, size: of this rank, and of the world.
        master: True on rank 0, which reports for all ranks.
        local_rank, local_size: within the node group, the ranks that share a node's memory.
        cross_rank, cross_size: within the cross group, the ranks with this local rank.
        device: the torch device of this rank.
        topology: the node of every rank.
        places: the host, device and threads of every rank, by rank.
        collectives: a `zero.Collectives` over all ranks.
        kernels: sums, casts and norms on the device (`zero.kernels.Kernels`).
        algorithm: name of the algorithm that reduces full buckets.
        tuning: the reason for it, in one line; empty if there was nothing to choose.
        transport, transport_line: the transport of GPU tensors, and one line with the reason; empty
            on CPUs and for one rank.
        sharing: a warning about GPUs that several ranks share; empty if none is shared.
        library: name, thread level and build of the MPI library.
    """

    def __init__(self, comm: "MPI.Intracomm | None", settings: WorldSettings) -> None:
        self._optimizers: list[ZeroOptimizer] = []
        self._open = True
        self._parts = parts = bootstrap(comm, settings)
        self.rank, self.size = parts.comm.rank, parts.comm.size
        self.master = self.rank == 0
        self.topology = topology = parts.topology
        self.local_rank = topology.local_rank(self.rank)
        self.local_size = len(topology.node_group(self.rank))
        cross_group = topology.cross_group(self.rank)
        self.cross_rank, self.cross_size = cross_group.index(self.rank), len(cross_group)
        self.device, self.kernels, self.sharing = parts.device, parts.kernels, parts.sharing
        self.collectives, self.places, self.library = parts.collectives, parts.places, parts.library
        warning = parts.devices.copier.warning if parts.devices else ""
        self.transport = parts.transport.name
        self.transport_line = "; ".join(filter(None, [parts.transport.line, warning]))
        self.algorithm = parts.collectives.choice.algorithm
        self.tuning = parts.tuning

    @cached_property
    def node_collectives(self) -> WorldCollectives:
        """`zero.Collectives` over the node group. The first access is collective in the world."""
        return make_group_collectives(self._parts, "node")

    @cached_property
    def cross_collectives(self) -> WorldCollectives:
        """`zero.Collectives` over the cross group. The first access is collective in the world."""
        return make_group_collectives(self._parts, "cross")

    def optimizer(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        stage: int = 0,
        partition: Literal["element", "parameter"] = "element",
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        non_finite: Literal["stop", "skip"] = "stop",
        loss_scale: float | Literal["dynamic"] | None = None,
        groups: Iterable[dict[str, Any]] | None = None,
        comm_hook: str | CommHook | None = None,
        schedule: SyncSchedule | None = None,
        **kwargs: Any,
    ) -> ZeroOptimizer:
        """Make a distributed optimizer for a model on `device`. Collective.

        Overwrites the model's parameters and buffers with rank 0's; buffers in its state dict are
        taken from rank 0 again after every step. Updated parameters arrive during the next
        forward: each module waits for its own when it is called.

        Any torch optimizer class will do; it gets `kwargs` as its arguments. `groups` are parameter
        groups in torch's format; by default all parameters form one. The groups of a `schedule` are
        `node_collectives` and `cross_collectives`. `zero.ZeroOptimizer` documents the other options
        and `step`.

        Raises AgreedError (a ValueError) on all ranks if they differ in the names, shapes, dtypes
        or strides of the model, in an argument from `stage` to `loss_scale`, or in the class or a
        public number, string or bool of `comm_hook` or `schedule`; or if any rank cannot accept
        one.
        """
        options: dict[str, Any] = {
            "stage": stage,
            "partition": partition,
            "max_grad_norm": max_grad_norm,
            "norm_type": norm_type,
            "non_finite": non_finite,
            "loss_scale": loss_scale,
            "comm_hook": comm_hook,
            "schedule": schedule,
        }
        errors.expect_same(self.gather(errors.describe(model, options)), self.rank)
        with self.agreement():  # before any collective allocation
            named = name_parameters(model, groups)
            check_trainable(named, sharded=stage != 0)
        persistent = model.state_dict().keys()  # other buffers are constants, equal everywhere
        with self.agreement():
            optimizer = ZeroOptimizer(
                named,
                optimizer_class,
                self.collectives.replace(choice=self.collectives.choice.among_others()),
                bucket_bytes=self._parts.settings.bucket_bytes,
                buffers=[b for name, b in model.named_buffers() if name in persistent],
                order=[name for name, _ in model.named_parameters()],
                model=model,
                wire_dtype=TRAVEL_DTYPES[self._parts.settings.wire_dtype],
                gather_dtype=TRAVEL_DTYPES[self._parts.settings.gather_dtype],
                kernels=self.kernels,
                **options,
                **kwargs,
            )
        optimizer.start()
        self._optimizers.append(optimizer)
        return optimizer

    def shard(self, loader: Iterable[Any], seed: int = 0) -> ShardedLoader:
        """Return an iterable over this rank's part of every global batch of `loader`. Local.

        From a torch DataLoader, each rank loads only its own samples; the batches of any other
        iterable are cut along their first dimension (`mntrain.data.loader.ShardedLoader`). Before
        each batch, the optimizers of this world learn this rank's share of it, so a mean loss gives
        the exact mean over the global batch even if shares differ. `seed` decides how a shuffling
        loader shuffles, independently of the number of ranks.
        """
        self._parts.engine.check_open()
        return ShardedLoader(loader, self.rank, self.size, seed, self._set_share)

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank. Collective; for small picklable objects."""
        return self.gather_later(value).wait()

    def gather_later(self, value: T) -> Future[list[T]]:
        """Start a `gather`, and return a future whose `wait` returns its result. Collective."""
        return self._parts.engine.call(lambda: self._parts.comm.gather_objects(value))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return elementwise sums over all ranks, in fp64. Collective; equal lengths."""
        totals = torch.tensor(values, dtype=torch.float64)
        self.collectives.all_reduce(totals).wait()
        return [float(total) for total in totals]

    def agreement(self) -> AbstractContextManager[None]:
        """Return the context of `errors.agreement` over all ranks. Its end is collective."""
        self._parts.engine.check_open()
        return errors.agreement(self.gather, self.rank)

    def usage(self) -> list[Usage]:
        """Return the resources that each rank has used so far, by rank. Collective."""
        traffic = self._parts.comm.traffic
        return self.gather(
            Usage(
                peak_memory=peak_memory(),
                node_messages=traffic.messages["node"],
                node_bytes=traffic.bytes["node"],
                cross_messages=traffic.messages["cross"],
                cross_bytes=traffic.bytes["cross"],
                communication_s=self.collectives.busy_s,
                exposed_s=self.collectives.waited_s,
                pinned_memory=self.collectives.pinned_bytes,
                **device_memory(self.device),
            )
        )

    def close(self) -> None:
        """Finish queued collectives, free the communicators and restore the hooks. Collective.

        Does nothing for a world that is closed or abandoned already.
        """
        if self._open:
            self._open = False
            for optimizer in self._optimizers:
                optimizer.close()
            self._parts.resources.close()

    def abandon(self) -> None:
        """Leave the world without waiting for any other rank, for example after one was lost.

        Local. Stops the communication thread, and removes the hooks from models and from the
        interpreter. Every later use, and every pending collective, raises RuntimeError; tensors
        that were being reduced or gathered hold undefined values. The communicators are not freed,
        since that is collective. The remaining ranks can make another world over a communicator of
        their own: `mntrain.init(comm)`. A process that exits may wait in MPI_Finalize for the other
        ranks of the job to exit, too.
        """
        if not self._open:
            return
        self._open = False
        self._parts.resources.pop_all()  # frees collectively
        self._parts.comm.abandon()  # ends a blocking wait in the communication thread
        self._parts.engine.abandon()
        for optimizer in self._optimizers:
            with suppress(RuntimeError):  # of parameters that were still in flight
                optimizer.close()
        self._parts.watch.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the world; for an exception on this rank alone, end the whole job instead."""
        if not self._open:
            return
        agreed = isinstance(error, AgreedError)
        clean_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not agreed and not clean_exit and self.size > 1:
            self._parts.watch.end_job(error)
        self.close()
        if agreed:
            self._parts.watch.install()  # lets rank 0 alone print it if nobody catches it

    def _set_share(self, count: int | None) -> None:
        for optimizer in self._optimizers:
            optimizer.share(count)


def init(
    comm: "MPI.Intracomm | None" = None,
    *,
    device: str = "auto",
    algorithm: str = "auto",
    bucket_mb: float = 25.0,
    ranks_per_node: int | None = None,
    tune: bool = True,
    wire_dtype: str = "fp32",
    gather_dtype: str = "fp32",
    transport: str = "auto",
) -> World:
    """Start MPI if necessary, and make a world of the ranks of `comm`. Collective.

    All arguments but `comm` and `device` must be equal on all ranks. Raises AgreedError (a
    ValueError) on all ranks for an argument that any rank cannot accept, and
    mpi.SilentSingletonsError if the launcher started more ranks than MPI sees.

    Args:
        comm: duplicated; stays the caller's. Default: all ranks of the job.
        device: auto, cpu or cuda. auto: cuda if there is any; then every rank needs one.
        algorithm: auto, or one of `mntrain.comm.algorithms.names()`.
        bucket_mb: size of a gradient bucket in MiB.
        ranks_per_node: cut every node into virtual nodes of this many ranks.
        tune: for algorithm auto, time the candidates (about a second; cached). False: use lanes.
        wire_dtype: fp32, bf16 or fp16, in which wider gradients cross nodes.
        gather_dtype: the same for updated parameters at stages 1 and 2.
        transport: auto, host, cuda-aware or nccl, for tensors on GPUs (`mntrain.comm.transport`).

    """
    settings = WorldSettings(
        device, algorithm, bucket_mb, ranks_per_node, tune, wire_dtype, gather_dtype, transport
    )
    return World(comm, settings)
