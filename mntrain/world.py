"""The public interface of a job: `init`, and the `World` that it makes."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, Self, TypeVar
from weakref import proxy

import torch
from torch import nn

from mntrain import errors
from mntrain.checkpoint import Saved, Stateful
from mntrain.checks.finding import print_warnings
from mntrain.comm.forked import call_in_child
from mntrain.comm.ticket import Signature, Ticket
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.data.loader import ShardedLoader, ShardOptions, ShardRegistry
from mntrain.data.source import Divider
from mntrain.errors import AgreedError
from mntrain.options.config import WorldConfig
from mntrain.ranks import Number, Ranks
from mntrain.recorder.events import call_site
from mntrain.run.batch_norms import convert_batch_norms
from mntrain.run.distributed_optimizer import make_optimizer
from mntrain.run.means import weighted_mean
from mntrain.run.metrics_log import MetricsLog
from mntrain.run.ordered import gather_in_order
from mntrain.run.other_libraries import (
    gather_states,
    guard_torch_checkpoints,
    lone_accelerator,
    warn_of_local_metrics,
)
from mntrain.run.own_loop import OwnLoop
from mntrain.run.saving import Checkpoints
from mntrain.run.signals import Stop
from mntrain.sync import LocalSGD
from mntrain.timeline import Timeline
from zero.collectives import AllRanksError
from zero.comm_hooks import CommHook
from zero.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from mpi4py import MPI

P = ParamSpec("P")
T = TypeVar("T")


class World(Ranks):
    """All ranks of a job, and their tools for training. Made by `init` on all ranks together.

    A context manager. `mntrain.ranks.Ranks` lists the attributes, besides:
        batch_counts: micro-batches of a step by rank, with --balance.mode cadence; else None.
        own_loop: its runs, behind the methods (`mntrain.run.own_loop.OwnLoop`); a job uses it, too.
    """

    def __init__(self, comm: "MPI.Intracomm | None" = None, **options: Any) -> None:
        self._optimizers: list[ZeroOptimizer] = []
        self._optimizer_numbers = count(1)
        self._open = True
        super().__init__(comm, options)
        self.batch_counts: tuple[int, ...] | None = None
        call_in_child(self._leave_to_parent)
        self._guards = ExitStack()  # of other libraries' functions
        self._guards_torch = self._guards_metrics = False
        world = proxy(self)
        self._shards = ShardRegistry(world, self._optimizers, self.recorder.span)
        self.own_loop = OwnLoop(world, self._optimizers, self._shards)
        self._batch_norms = count(1)  # numbers of the calls of `sync_batchnorm`

    @cached_property
    def node_collectives(self) -> WorldCollectives:
        """`zero.Collectives` over the node group. The first access is collective in the world."""
        return self.group_collectives("node")

    @cached_property
    def cross_collectives(self) -> WorldCollectives:
        """`zero.Collectives` over the cross group. The first access is collective in the world."""
        return self.group_collectives("cross")

    def optimizer(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        groups: Iterable[Any] | None = None,
        comm_hook: CommHook | None = None,
        sync: LocalSGD | None = None,
        stage: int = 0,
        partition: Literal["auto", "element", "parameter"] = "auto",
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        non_finite: Literal["stop", "skip"] = "stop",
        loss_scale: float | Literal["dynamic"] | None = None,
        overlap_forward: bool = False,
        check_every: int = 100,
        **kwargs: Any,
    ) -> ZeroOptimizer:
        """Make a distributed optimizer for a model on `device`. Collective.

        Overwrites the model's parameters and buffers with rank 0's, also those that are in no
        `groups`; buffers are taken from rank 0 again after every step. The world keeps the
        optimizer, and so the model, until `close` of either. With `overlap_forward`, updated
        parameters arrive during the next forward: each module waits for its own when it is called.

        Any torch optimizer class will do; it gets `kwargs` as its arguments. `zero.Options`
        documents the options from `stage` to `check_every`. `groups` are what torch's optimizers
        take: parameters or parameter groups, with or without names; by default all parameters form
        one group. With `sync` nodes exchange parameters every few steps instead of gradients in
        each: by a description in `mntrain.sync`, such as `DiLoCo`. `zero.ZeroOptimizer` documents
        the `step`. It closes an optimizer that has trained any of the parameters so far: each has
        one optimizer at a time.

        Raises AgreedError (a ValueError) on all ranks if they differ in the names, shapes, dtypes
        or strides of the model, in an option from `stage` to `check_every`, in the class or a
        public number, string, bool or dtype of `comm_hook` or `sync`, or in the class, options and
        parameters of the torch optimizer; or if any rank cannot accept one.
        """
        optimizer = make_optimizer(
            self,
            model,
            optimizer_class,
            number=next(self._optimizer_numbers),
            groups=groups,
            comm_hook=comm_hook,
            sync=sync,
            options={
                "stage": stage,
                "partition": partition,
                "max_grad_norm": max_grad_norm,
                "norm_type": norm_type,
                "non_finite": non_finite,
                "loss_scale": loss_scale,
                "overlap_forward": overlap_forward,
                "check_every": check_every,
            },
            kwargs=kwargs,
            check_exchanged=self.own_loop.check_exchanged,
        )
        optimizer.accumulation.observe = self.recorder.span
        self._optimizers[:] = [one for one in self._optimizers if not one.closed]
        self._optimizers.append(optimizer)
        self._shards.tell(optimizer)
        if not self._guards_torch:
            guard_torch_checkpoints(self._guards, self.rank)
            self._guards_torch = True
        self._guard_metrics()
        return optimizer

    def _guard_metrics(self) -> None:
        """Warn of metrics of this rank's samples, if their library is imported so far. Local."""
        if self.master and self.size > 1 and not self._guards_metrics:
            self._guards_metrics = warn_of_local_metrics(self._guards)

    def sync_batchnorm(self, model: nn.Module) -> nn.Module:
        """Make BatchNorm layers normalize by the samples of all ranks. Collective; returns `model`.

        In place, as torch's `convert_sync_batchnorm`, which needs torch.distributed: the layers'
        parameters, buffers and names in the state dict stay. Their statistics and gradients are
        those of one process with the whole batch, for any parts of it; every rank runs the same
        forward and backward passes in training. Evaluation is local. Raises AgreedError on all
        ranks for a model without such layers, or with layers of classes derived from them.
        """
        return convert_batch_norms(self, self._optimizers, model, next(self._batch_norms))

    def shard(
        self,
        loader: Iterable[Any],
        seed: int = 0,
        *,
        train: bool | None = None,
        weight: Callable[[Any], float] | None = None,
        balance: bool | Divider = False,
        divided: bool = False,
    ) -> ShardedLoader:
        """Return an iterable over this rank's part of every global batch of `loader`. Local.

        From a torch DataLoader, each rank loads only its own samples; the batches of any other
        iterable are cut by samples (`mntrain.data.loader.ShardedLoader`). Before each batch, the
        optimizers of this world learn this rank's share of it, so a mean loss gives the exact mean
        over the global batch even if shares differ. With `weight`, the share is what it returns for
        this rank's part, such as its number of tokens. In an evaluation the optimizers learn
        nothing, and every sample is handed out once: ranks may get unequal numbers of batches.
        `train` says whether passes train or evaluate. Without it, those that begin under
        `torch.no_grad()` evaluate, and RuntimeError is raised where that shows to be wrong
        (`ShardedLoader`).

        All ranks give the same loader, over all data. The first iteration over a loader is
        collective: ranks compare its sizes, and some samples of the first batch. AgreedError (a
        ValueError) on all ranks if they differ, as those do that were divided between ranks before;
        what is random in a sample is not compared. With `divided`, each rank gives a loader of its
        own part of the data, whose batches it gets whole. Then this call is collective, and so is
        each batch while training: the epoch ends on all ranks together, with stand-ins of weight 0
        on those that have no more.

        Each iteration is an epoch of its own, also if `shard` is called for each one. `seed`
        decides how a shuffling loader shuffles, independently of the number of ranks: each epoch,
        and each dataset that the world gets with this seed, in another order. With
        `balance`, parts follow the speeds of ranks, measured while training: then the training
        thread of every rank iterates over it, and every tenth batch is collective, and waits for
        the GPU. There, a part grows only as far as memory suffices if it grows with the part.
        Rank 0 warns of slow ranks. A job gives a function that divides, which it revises itself.
        Raises ValueError if accelerate's Accelerator trains each rank alone.
        """
        self._engine.check_open()
        self._guard_metrics()
        if alone := lone_accelerator(self.size):
            raise ValueError(alone)
        return self._shards.shard(loader, ShardOptions(seed, train, weight, balance, divided))

    def gather_in_order(self, predictions: Any) -> Any:
        """Return the predictions for all samples of a pass over a shard, on all ranks. Collective.

        Once for each sample, in the order in which the loader draws them, whatever the number of
        ranks, with `balance` too. `predictions` are of the last pass over `shard` from which this
        rank has drawn: a list with one entry a batch, or one entry for all its samples. An entry is
        a tensor, an array or a list with one row a sample, or a tuple, mapping or dataclass of
        these. In the result, batches are joined; its tensors are new, on `device` if any rank has
        given one there, and without gradients. Raises AgreedError on all ranks if an entry is
        missing, if rows are not those of the samples, and for data that ranks have read apart.
        """
        return gather_in_order(self, self._shards.latest, predictions)

    def metric(self, metric: T) -> T:
        """Let a torchmetrics Metric or MetricCollection compute over all ranks; return it. Local.

        Each rank updates it with its own samples. From then on its `compute` is collective, and so
        is a `forward` with dist_sync_on_step; other calls are local. Ranks may have unlike numbers
        of updates, or none. Raises ValueError for what is no metric, and for one that gathers its
        state in a way of its own.
        """
        self._engine.check_open()
        if self.size == 1:
            return metric
        world = proxy(self)  # the metric may outlive it

        def gather(value: object) -> list[Any]:
            return world.gather(value)  # type: ignore[no-any-return]

        return gather_states(metric, gather)

    def checkpoints(
        self,
        run_dir: str | Path,
        *,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        every: int | str = "auto",
        keep: int = 3,
        local: str | Path | None = None,
        local_every: int | str = "auto",
        **objects: Stateful,
    ) -> Checkpoints:
        """Return the checkpoints of an own loop's run: its `restore` and `save`. Collective.

        The format is that of `python -m mntrain`, whatever the number of ranks and the stage.
        `every` is a number of steps, minutes such as "10min", "auto" (the interval that loses least
        time), or 0 (only `save(step, now=True)`); the newest `keep` checkpoints are kept. `objects`
        are saved too: scheduler=, data=, or any other with a small state_dict.

        `local` is a folder on each node, in its memory (/dev/shm/NAME) or on a disk of its own.
        Every `local_every` steps, or as often as costs at most 1 % of the time ("auto"), ranks save
        their parts there, with a copy on another node: `restore` takes the newest step that is
        whole. Such checkpoints are removed when the world is closed without an error, if the last
        step is saved in `run_dir`.

        Raises AgreedError for a wrong argument, if another job uses the directory, and if `local`
        cannot be used on a node. Nothing of the run is written before `restore`.
        """
        options = {"every": str(every), "keep": keep, "local_every": str(local_every)}
        options["local"] = local and str(local)
        return self.own_loop.checkpoints(run_dir, Saved(model, optimizer, objects), options)

    def metrics(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        tensorboard: bool = False,
        wandb: str | None = None,
        mlflow: str | None = None,
        prometheus: bool = False,
        per_rank: bool = False,
        report: bool = False,
    ) -> MetricsLog:
        """Return a log that writes metrics.jsonl and summary.json into a run. Collective.

        On request, the same values go to TensorBoard (tensorboard/ in the run), W&B (`wandb` is the
        project), MLflow (`mlflow` is the experiment) and, for Prometheus, to metrics.prom; an error
        of one of the tools ends its copy with a warning. With `per_rank`, lines also have the times
        and the memory of each rank. With `report`, the log's end writes report.html, a page about
        the run.
        Writes `config`, nested options such as vars(args), as config.toml. Raises AgreedError if
        ranks give it other values, the directory cannot be written, or another job uses it. Options
        that are named device, rank, local_rank or alike may differ (`RANK_OPTIONS`). The files are
        made at once, or if the run has checkpoints in this world, by their `restore`.
        """
        copies = {
            "tensorboard": tensorboard,
            "wandb": wandb,
            "mlflow": mlflow,
            "prometheus": prometheus,
            "per_rank": per_rank,
            "report": report,
        }
        return self.own_loop.metrics(run_dir, config, copies)

    def report(self) -> dict[str, Any]:
        """Print the final report on rank 0, and return its figures on all ranks. Collective.

        Of the optimizers of this world that are not closed: their memory by role, predicted and
        measured, and what it saves against stage 0; samples a second of `shard`; what was sent,
        compressed and waited for. The figures are those of summary.json (docs/metrics.md), in bytes
        and seconds.
        """
        self._engine.check_open()
        return self.own_loop.report()

    def timeline(self, path: str | Path) -> Timeline:
        """Return a context manager that records what all ranks do in its block. Local.

            with world.timeline("trace.json.gz"):
                for step in range(3):
                    ...

        Its begin and end are collective, between steps: ranks compare their clocks. At the end, and
        after an error of all ranks, rank 0 writes one trace in the Trace Event Format, compressed
        if the path ends with .gz, which https://ui.perfetto.dev opens. It has all collectives, the
        waits for them, the loads of `shard`, backward from its first gradient on, the steps of
        optimizers, and saves of `checkpoints`; `with world.recorder.phase("forward"):` adds what
        else is to be seen. On a GPU, times are those of the host. The begin raises AgreedError if
        another timeline is recorded, or if rank 0 can make no file there; the end, if it cannot
        write the file.
        """
        return Timeline(self, path)

    def stop_requested(
        self,
        max_minutes: float | None = None,
        *,
        grace: float = 30.0,
        reason: str | None = None,
    ) -> Stop | None:
        """Return a `status` and `reason` if any rank was asked to end, else None. Collective.

        The same on all ranks, which call it once a step; no rank waits for another. A request
        counts in the call that follows the next gradients of all ranks; where nodes train alone,
        the next exchange. Requests are SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which from the first
        call on do not end the process (a second SIGINT does), the end of the batch job, and
        `max_minutes`; the last two leave time for a step and a checkpoint; and a `reason` that any
        rank's own code has. A job whose ranks have not agreed `grace` seconds after a signal is
        ended with a report: give more than two of the longest steps take. The first two arguments
        count as they are in the first call since the world was made. Raises AgreedError if they
        are no numbers.
        """
        return self.own_loop.stop_requested(max_minutes, grace, reason)

    def mean(self, value: Number, weight: float = 1.0) -> Number:
        """Return the mean over all ranks, in fp64, weighted for example by samples. Collective.

        For a number a float; for a tensor, of the same shape on all ranks, a new one, elementwise.
        A rank of weight 0 does not count, whatever its value. Raises AgreedError (a ValueError) on
        all ranks for what is no real number, for a weight below 0 or not finite, and if all are 0.
        """
        return weighted_mean(self.collectives, value, weight)

    @contextmanager
    def main_first(self, *, local: bool = False) -> Iterator[None]:
        """Run a block on rank 0, and then on all others; with `local`, first on each node's first.

        Such as a download, which the others then find done. Collective; nothing in the block may
        be. A ValueError, OSError, ImportError or RuntimeError of the first becomes an AgreedError
        on all ranks, and the others skip the block. They wait for the first no longer than the
        world's `timeout`.
        """
        first = self.local_rank == 0 if local else self.master
        with self.agreement():
            if first:
                yield
        if not first:
            yield

    def close(self) -> None:
        """Finish queued collectives, free the communicators and restore the hooks. Collective.

        Does nothing for a world that is closed or abandoned already, and in a forked child. A world
        whose ranks have disagreed about a collective is abandoned, and the error is raised again:
        a script may have caught it and gone on.
        """
        if self._open:
            self._end_in_order()
            self._close()
            if self._engine.error is not None:
                raise self._engine.error

    def _end_in_order(self) -> None:
        if self._engine.error is not None or self._engine.abandoned:
            return
        if self.settings.report:
            self.report()
        self.own_loop.flush()
        self.own_loop.end_local()

    def _close(self) -> None:
        self.recorder.begin_phase("close")
        try:
            if not self._engine.abandoned:
                self.own_loop.flush()
                for optimizer in self._optimizers:
                    optimizer.close()
                self._engine.finish(Ticket(Signature("world.close"), call_site())).wait()
        finally:
            if self._engine.abandoned:
                self.abandon()
                self._watch.install()  # lets rank 0 alone print the error
        if self._open:
            self._open = False
            self._guards.close()
            alone = lone_accelerator(self.size)
            if alone and self.master and not self._optimizers:
                warnings.warn(alone, stacklevel=3)
            self.own_loop.close()
            self._resources.close()

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
        self._guards.close()
        self._resources.pop_all()  # frees collectively
        self._comm.abandon()  # ends a blocking wait in the communication thread
        self._engine.abandon()
        self.own_loop.close()
        self.watchdog.close()
        for optimizer in self._optimizers:
            with suppress(RuntimeError, AgreedError):  # of parameters that were still in flight
                optimizer.close()
        self._watch.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the world; for an exception on this rank alone, end the whole job instead."""
        if not self._open:
            return
        first = self._engine.error or error  # other errors follow from the first
        if first is not None and not errors.raised_by_all(first):
            if self.size > 1:
                self._watch.end_job(first)
            self._watch.end_run(first)
        if first is None:
            self._end_in_order()
        elif not isinstance(first, SystemExit):
            self.recorder.error_raised(first)
        self._close()
        if isinstance(first, AllRanksError):
            self._watch.install()  # lets rank 0 alone print it if nobody catches it
        if first is not None and first is not error:
            raise first from error

    def _leave_to_parent(self) -> None:
        self._open = False


class _Init(Protocol[P]):
    """The signature of `init`, whose keyword arguments are those of a class of options."""

    def __call__(
        self, comm: "MPI.Intracomm | None" = None, *args: P.args, **options: P.kwargs
    ) -> World: ...


def _with_arguments_of(kind: Callable[P, object]) -> Callable[[Callable[..., World]], _Init[P]]:
    """Return a decorator that gives a function the keyword arguments of `kind` as its options."""

    def decorate(function: Any) -> Any:
        own, options = inspect.signature(function), inspect.signature(kind)
        parameters = [own.parameters["comm"], *options.parameters.values()]
        function.__signature__ = own.replace(parameters=parameters)
        return function

    return decorate


@_with_arguments_of(WorldConfig)
def init(comm: "MPI.Intracomm | None" = None, **options: Any) -> World:
    """Start MPI if necessary, and make a world of the ranks of `comm`. Collective.

    All arguments but `comm` and `device` must be equal on all ranks. Raises AgreedError (a
    ValueError) on all ranks for an argument that any rank cannot accept, and for a check
    (`mntrain.alike.rank_facts`) that fails, before MPI starts or after. Rank 0 prints warnings.

    Args:
        comm: duplicated; stays the caller's. Default: all ranks of the job.
        device: auto, cpu or cuda. auto: cuda if there is any; then every rank needs one.
        report: print the final report of `World.report` when the world is closed without an error.
        options: as those of `python -m mntrain --help` that begin with --comm.

    """
    world = World(comm, **options)
    print_warnings(world.findings.values() if world.master else ())
    return world
