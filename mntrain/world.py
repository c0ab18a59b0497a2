"""The world of a job: its ranks, their nodes and devices, and what they do together."""

import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import nn

from mntrain import device, kernels, rank_agreement, transport, tuning
from mntrain.comm import mpi
from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.collectives import Devices, WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.pending import Future
from mntrain.comm.topology import Topology
from mntrain.data.loader import ShardedLoader, shard
from mntrain.errors import AgreedError, ExceptionWatch
from mntrain.metrics.step import Place, Usage, device_memory, peak_device_memory, peak_memory
from mntrain.transport import setup
from zero.layout import MIB
from zero.optimizer import ZeroOptimizer
from zero.param_groups import check_trainable

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class WorldSettings:
    """The arguments of `init` that every rank gives alike, but for the device."""

    device: str
    algorithm: str
    bucket_mb: float
    ranks_per_node: int | None
    tune: bool
    wire_dtype: str
    transport: str


# The dtypes in which gradients travel between nodes; None: as they are.
WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class World:
    """All ranks of a job. Made by `init`, by all ranks together; close it with `with`.

    Attributes, all of them local facts: `rank`, `size`; `local_rank`, `local_size` within the node
    group; `cross_rank`, `cross_size` within the cross group (the ranks with this local rank, one
    a node); `device`; `topology`; `collectives`, which satisfies `zero.Collectives`; `algorithm`,
    the name of the one that moves full buckets; `tuning`, where it was left to this program, what
    it chose and why, in a line; `places`, where every rank runs; `library`, the MPI.
    """

    def __init__(self, comm: "MPI.Intracomm | None", wanted: WorldSettings) -> None:
        self._world, self.library = mpi.start(comm)
        self.rank, self.size = self._world.rank, self._world.size
        self._watch = ExceptionWatch(self.rank, self.size, socket.gethostname())
        self._watch.install()
        self._progress = ProgressEngine()
        self._node: mpi.Communicator | None = None
        self._route = setup.SelectedTransport()
        self._optimizers: list[ZeroOptimizer] = []
        try:
            self._settle(wanted)
        except AgreedError as error:
            self._leave(error)
            raise

    def _settle(self, wanted: WorldSettings) -> None:
        """Find out who is where, and with what. Collective."""
        hosts = self._world.node_keys()
        on_host = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        with self.agreement():
            chosen = "lanes" if wanted.algorithm == "auto" else wanted.algorithm
            table = AlgorithmTable.always(chosen)
            self.topology = Topology.from_hosts(hosts, wanted.ranks_per_node)
            seen = device.visible_gpus(wanted.device)
            if not 1 / MIB <= wanted.bucket_mb < math.inf:
                raise ValueError(
                    f"bucket_mb is {wanted.bucket_mb}: a bucket must hold at least one byte"
                )
            if wanted.wire_dtype not in WIRE_DTYPES:
                raise ValueError(
                    f"wire_dtype {wanted.wire_dtype!r} is unknown: choose {', '.join(WIRE_DTYPES)}"
                )
            transport.expect_known(wanted.transport)
            self._bucket_bytes = int(wanted.bucket_mb * MIB)
            self._wire_dtype = WIRE_DTYPES[wanted.wire_dtype]
        self._expect_same(**{**asdict(wanted), "device": None})  # devices may differ
        everyone_sees = self.gather(seen)
        assigned = device.assign_all(hosts, everyone_sees)
        self._gpus = [given.gpu for given in assigned]
        self.device = assigned[self.rank].device
        self.sharing = device.sharing(hosts, self.gather(self._watch.host), everyone_sees)
        my_node = self.topology.node(self.rank)
        self.local_rank = self.topology.local_rank(self.rank)
        self.local_size = len(self.topology.node_group(self.rank))
        cross_group = self.topology.cross_group(self.rank)
        self.cross_rank, self.cross_size = cross_group.index(self.rank), len(cross_group)
        self._node = node = self._world.split(my_node, self.local_rank, "node")
        here = self.topology.node_group(self.rank)
        self._world.levels = ["node" if rank in here else "cross" for rank in range(self.size)]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._share_cores(on_host)
        self.kernels = kernels.choose(self.device)
        kinds = self.gather(self.device.type)
        devices = setup.devices(kinds, self.device, self.kernels, self._progress)
        self.collectives = self._progress.call(
            lambda: WorldCollectives(self._world, node, self.topology, self._progress, devices)
        ).wait()
        try:
            self._route = setup.set_up(
                wanted.transport,
                world=self._world,
                node=node,
                topology=self.topology,
                progress=self._progress,
                collectives=self.collectives,
                devices=devices,
                gpus=self._gpus,
                library=self.library.build,
                bucket_bytes=self._bucket_bytes,
            )
        except transport.UnusableError as error:
            raise AgreedError(str(error), self.rank) from None
        self.collectives = self._route.collectives or self.collectives
        self.transport, self.transport_line = self._route.transport, self._route.line
        self.tuning = ""
        if wanted.algorithm == "auto" and self.size > 1 and self.transport != "nccl":
            tuned = self._tuned(node, devices) if wanted.tune else tuning.untuned()
            table, self.tuning = tuned.table, tuned.line
        self.collectives = self.collectives.replace(table=table)
        self.algorithm = table.of(self._bucket_bytes).algorithm
        self.places: list[Place] = self.gather(
            Place(
                self.rank,
                self._watch.host,
                self.topology.node(self.rank),
                self.local_rank,
                str(self.device),
                torch.get_num_threads(),
                self._gpus[self.rank],
                torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "",
            )
        )

    @property
    def master(self) -> bool:
        """Whether this is rank 0, which reports."""
        return self.rank == 0

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
        **kwargs: Any,
    ) -> ZeroOptimizer:
        """Make a distributed optimizer of any torch optimizer, for a model on `device`. Collective.

        Overwrites parameters and buffers with rank 0's; those buffers that are part of the model's
        state are taken from rank 0 after every step, too. `groups` are parameter groups of the
        model's parameters, as torch takes them; by default one group of all. `kwargs` go to
        `optimizer_class`; the other arguments, which must be the same on all ranks, are those of
        `zero.ZeroOptimizer`, which also says what `step` does. Parameters that `step` changed
        arrive during the next forward: the model's modules wait for theirs when they are called.
        Raises AgreedError (a ValueError) on all ranks when ranks differ in the model or in an
        argument, or for what any of them refuses.
        """
        shared: dict[str, Any] = {
            "stage": stage,
            "partition": partition,
            "max_grad_norm": max_grad_norm,
            "norm_type": norm_type,
            "non_finite": non_finite,
            "loss_scale": loss_scale,
        }
        self._expect_same(**shared)
        with self.agreement():
            named = _named_groups(model, groups)
        rank_agreement.expect_same_model(
            self.gather(rank_agreement.describe_model(model)), self.rank
        )
        with self.agreement():  # before memory is made together
            check_trainable(named, sharded=stage != 0)
        kept = model.state_dict().keys()  # tables of constants need not travel in every step
        with self.agreement():
            optimizer = ZeroOptimizer(
                named,
                optimizer_class,
                self.collectives.replace(table=self.collectives.table.among_others()),
                bucket_bytes=self._bucket_bytes,
                buffers=[b for name, b in model.named_buffers() if name in kept],
                order=[name for name, _ in model.named_parameters()],
                model=model,
                wire_dtype=self._wire_dtype,
                kernels=self.kernels,
                **shared,
                **kwargs,
            )
        optimizer.start()
        self._optimizers.append(optimizer)
        return optimizer

    def shard(self, loader: Iterable[Any], seed: int = 0) -> ShardedLoader:
        """This rank's part of every batch of a loader, in which each batch is a global one.

        Local. A torch DataLoader is taken apart so that a rank loads only its own samples; any
        other iterable's batches are cut along their first dimension. Before a batch is handed out,
        each optimizer of this world is told this rank's share of it, so a mean loss gives the
        exact mean over the global batch even where shares differ. `seed` decides how a shuffling
        loader shuffles, the same at any number of ranks. See `mntrain.data.loader.shard`.
        """
        return shard(loader, self.rank, self.size, seed, self._state_share)

    def gather(self, mine: T) -> list[T]:
        """Everyone's object, by rank, on every rank. Collective; for small picklable things."""
        return self.gather_later(mine).wait()

    def gather_later(self, mine: T) -> Future[list[T]]:
        """Ask as `gather` does, and go on; the ticket's `wait` gives the answer. Collective."""
        return self._progress.call(lambda: self._world.gather_objects(mine))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in fp64. Collective; every rank gives as many values."""
        totals = torch.tensor(values, dtype=torch.float64)
        self.collectives.all_reduce(totals).wait()
        return [float(total) for total in totals]

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run a block in which any rank may refuse, and let all refuse together. Collective.

        A ValueError, OSError, ImportError or RuntimeError inside becomes an AgreedError on every
        rank, which names the ranks it came from unless all said the same. Inside, no collective
        may follow what can raise.
        """
        refusal: Exception | None = None
        try:
            yield
        except AgreedError:
            raise
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            refusal = error
        said = self.gather(None if refusal is None else str(refusal) or type(refusal).__name__)
        if any(said):
            raise AgreedError(rank_agreement.combined_refusals(said), self.rank) from refusal

    def usage(self) -> list[Usage]:
        """What every rank has used so far, by rank. Collective."""
        traffic = self._world.traffic
        return self.gather(
            Usage(
                peak_memory(),
                peak_device_memory(self.device),
                traffic.messages["node"],
                traffic.bytes["node"],
                traffic.messages["cross"],
                traffic.bytes["cross"],
                self.collectives.busy_s,
                self.collectives.waited_s,
                **device_memory(self.device),
                pinned_memory=self.collectives.pinned_bytes,
            )
        )

    def close(self) -> None:
        """Finish what is under way and free the communicators. Collective; once."""
        for optimizer in self._optimizers:
            optimizer.close()
        if self._route.near is not None:
            self._route.near.close()
        self._progress.close()
        if self._node is not None:
            self._node.free()
        self._world.free()
        self._watch.uninstall()

    def __enter__(self) -> Self:
        """The world itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; or, for an exception that is this rank's alone, end the whole job."""
        harmless = isinstance(error, AgreedError) or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        )
        if error is not None and not harmless and self.size > 1:
            self._watch.end_job(error)
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Close; what is agreed on is still to be printed by one rank only."""
        self.close()
        if isinstance(error, AgreedError):
            self._watch.install()

    def _state_share(self, count: int | None) -> None:
        for optimizer in self._optimizers:
            optimizer.share(count)

    def _expect_same(self, **values: Any) -> None:
        """Raise AgreedError on all ranks unless all gave the same values. Collective."""
        rank_agreement.expect_same(self.gather(values), self.rank)

    def _tuned(self, node: mpi.Communicator, devices: Devices | None) -> tuning.Tuning:
        """What `auto` is here. Collective."""
        return tuning.tune(
            tuning.Rig(
                self._world,
                node,
                self.topology,
                self._progress,
                self.device,
                devices,
                self.collectives.transport,
            ),
            library=self.library.name,
            host=self._watch.host,
            bucket_bytes=self._bucket_bytes,
            shared=not any(self.gather(self.collectives.no_shared_memory_reason)),
        )

    def _share_cores(self, on_host: list[int]) -> None:
        """Let torch compute with this rank's part of the host's cores, unless the user said."""
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        everyone = self.gather(mine)
        if mine and "OMP_NUM_THREADS" not in os.environ:
            users = [everyone[rank] for rank in on_host]
            cores = sum(1 / sum(core in theirs for theirs in users) for core in mine)
            torch.set_num_threads(max(1, int(cores)))


def init(
    comm: "MPI.Intracomm | None" = None,
    *,
    device: str = "auto",
    algorithm: str = "auto",
    bucket_mb: float = 25.0,
    ranks_per_node: int | None = None,
    tune: bool = True,
    wire_dtype: str = "fp32",
    transport: str = "auto",
) -> World:
    """Start MPI, if nobody has, and make a world of the ranks of `comm`: all ranks by default.

    Collective. `comm` is duplicated and stays the caller's. `device` is auto, cpu or cuda;
    `algorithm` is auto, lanes, leader, flat or naive; `bucket_mb` the size of a gradient bucket in
    MiB; `ranks_per_node` makes virtual nodes of that many ranks. With algorithm auto the candidates
    are timed, which takes up to about two seconds and is kept in a cache; without `tune`, auto is
    lanes. `wire_dtype` (fp32, bf16, fp16) is the dtype in which gradients travel between nodes, if
    it is narrower than their own. `transport` (auto, host, cuda-aware, nccl) is how tensors of GPUs
    travel: see `mntrain.transport`.

    Raises AgreedError (a ValueError) on all ranks for a bad argument on any, and
    mpi.SilentSingletonsError when the launcher started more ranks than MPI sees.
    """
    wanted = WorldSettings(
        device, algorithm, bucket_mb, ranks_per_node, tune, wire_dtype, transport
    )
    return World(comm, wanted)


def _named_groups(
    model: nn.Module, groups: Iterable[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    if groups is None:
        return [{"params": list(model.named_parameters())}]
    names = {parameter: name for name, parameter in model.named_parameters()}
    try:
        return [{**g, "params": [(names[p], p) for p in _parameters(g)]} for g in groups]
    except KeyError:
        raise ValueError(
            "a parameter group holds a tensor that is no parameter of the model"
        ) from None


def _parameters(group: dict[str, Any]) -> Iterable[Any]:
    """A group's parameters; torch takes a single one as it is, too."""
    params: Iterable[Any] = group["params"]
    return [params] if isinstance(params, torch.Tensor) else params
