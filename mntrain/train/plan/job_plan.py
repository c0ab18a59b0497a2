"""The plan of a job: memory of a rank and bytes of a step, by its options alone."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, default_collate

from mntrain import compression, tasks
from mntrain.comm.topology import Topology
from mntrain.ranks import TRAVEL_DTYPES
from mntrain.train.forward import PRECISIONS
from mntrain.train.initialization import freeze
from mntrain.train.optimization import choose_optimizer
from mntrain.train.plan import activations, traffic
from mntrain.train.plan.plan_options import PlanOptions
from mntrain.train.plan.traffic import SentBytes
from zero.comm_hooks.between_nodes import Int8Hook
from zero.comm_hooks.codes import FP32
from zero.layout import Bucket, ParameterSpec, lay_out
from zero.memory import Memory
from zero.param_groups import as_groups, by_name, check_trainable
from zero.prediction import predict
from zero.trials import choose_partition

_ALL_SLOTS = 16  # of more shards, the largest is predicted
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class PlannedJob:
    """One line of a plan. Bytes are those of a rank; `sent` are those of all ranks in a step."""

    precision: str
    stage: int
    topology: Topology
    most: Memory  # by role, over ranks
    untrained: int  # frozen parameters, and buffers
    activations: int | None  # estimated; None if unknown
    sent: SentBytes | None  # None with a sync schedule
    checkpoint: int  # of all ranks: parameters, buffers and the optimizer's state

    @property
    def total(self) -> int:
        """The bytes of a rank, with activations as far as they are known."""
        return self.most.total + self.untrained + (self.activations or 0)


class JobPlan:
    """The model, optimizer and batch of a job, as `PlannedJob`s need them. Local.

    `notes` tell what was made on the CPU, and what is not planned. Raises ValueError as a job does
    for options that it refuses, and for what the task cannot do.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.notes: list[str] = []
        self._options = options
        self._task = tasks.load(options.task, options)
        self._train: Any = self._task.dataset("train")
        self.per_node = options.ranks_per_node or options.comm.ranks_per_node
        if options.sync.mode != "every-step":
            self._note(
                f"--sync.mode {options.sync.mode}: what its exchanges keep and send is not planned"
            )
        self._model = cache(self._make_model)
        self._memory = cache(self._predict)
        self._activations = cache(self._measure_activations)

    def jobs(self, precision: str) -> Iterator[PlannedJob]:
        """Yield the job on each number of ranks at each stage, the smallest first.

        All stages are one on a single rank, unless parameters are rounded to --comm.gather-dtype.
        """
        for ranks in self._options.ranks:
            topology = Topology.from_hosts([0] * ranks, self.per_node)
            differ = ranks > 1 or self._options.comm.gather_dtype != "fp32"
            for stage in (0, 1, 2) if differ else (0,):
                yield self._job(precision, stage, topology)

    def _job(self, precision: str, stage: int, topology: Topology) -> PlannedJob:
        options, dtypes = self._options, PRECISIONS[precision]
        nodes, ranks = len(topology.nodes), topology.size
        exchanges = options.sync.mode != "every-step" and nodes > 1
        shards = topology.smallest_node if exchanges else ranks
        plan = self._buckets(dtypes.parameters, shards)
        share = -(-options.train.batch_size // ranks)
        micro = min(share, options.train.micro_batch_size)
        times = -(-share // micro)
        chained = options.comm.compress != "none" and nodes > 1
        most = self._memory(dtypes.parameters, stage, shards, times if chained else 0)
        return PlannedJob(
            precision,
            stage,
            topology,
            replace(most, hook=self._hook(plan, topology)),
            self._untrained(dtypes.parameters),
            self._activations(precision, micro),
            None if exchanges else traffic.step(plan, stage, topology, options.comm, times),
            self._checkpoint(dtypes.parameters),
        )

    # The model and its optimizer.

    def _make_model(self, dtype: torch.dtype | None) -> nn.Module:
        """Return a model without memory if the task allows that, else on the CPU."""
        torch.manual_seed(self._options.run.seed)
        try:
            with torch.device("meta"):
                made = self._task.model()
        except Exception as error:
            self._note_on_cpu("the model was made", "it", error)
            with tasks.errors_of_task(self._task, "model() fails"):
                made = self._task.model()
        if dtype is not None:
            made.to(dtype)
        freeze(made, self._options.init.freeze)
        return made

    def _optimizer(
        self, dtype: torch.dtype | None
    ) -> tuple[list[dict[str, Any]], partial[Optimizer]]:
        """Return the named groups of trained parameters, and what makes the optimizer of groups."""
        model = self._model(dtype)
        _, bound = choose_optimizer(self._task, model, self._options.optim, _CPU)
        named = as_groups(bound.args[0], model)
        groups = check_trainable(named, sharded=False)
        return groups, partial(bound.func, **bound.keywords)

    def _untrained(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of the model's parameters that no optimizer has, and of its buffers."""
        model, (groups, _) = self._model(dtype), self._optimizer(dtype)
        trained = by_name(groups)
        frozen = [p for name, p in model.named_parameters() if name not in trained]
        return sum(t.numel() * t.element_size() for t in [*frozen, *model.buffers()])

    def _checkpoint(self, dtype: torch.dtype | None) -> int:
        whole = self._memory(dtype, 0, 1, 0)
        return whole.parameters + self._untrained(dtype) + whole.master + whole.state

    def _buckets(self, dtype: torch.dtype | None, shards: int) -> tuple[Bucket, ...]:
        groups, make = self._optimizer(dtype)
        trained = by_name(groups)
        specs = [
            ParameterSpec(name, tuple(parameter.shape), parameter.dtype)
            for name, parameter in self._model(dtype).named_parameters()
            if name in trained
        ]
        whole = choose_partition(make, self._options.zero.partition) == "parameter"
        loads = [0] * shards if whole else None
        return lay_out(specs, self._options.comm.bucket_bytes, shards, loads)

    def _predict(self, dtype: torch.dtype | None, stage: int, shards: int, chains: int) -> Memory:
        """Return the most by role that ranks hold.

        `chains`: the micro-batches of a step whose gradients are compressed between nodes, or 0.
        """
        groups, make = self._optimizer(dtype)
        plan = self._buckets(dtype, shards)
        owned = [sum(b.bounds[s + 1] - b.bounds[s] for b in plan) for s in range(shards)]
        slots: Sequence[int] = range(shards)
        if shards > _ALL_SLOTS:
            slots = [owned.index(max(owned))]
        gather = TRAVEL_DTYPES[self._options.comm.gather_dtype]
        on = partial(
            predict,
            plan,
            groups,
            make,
            stage=stage,
            shards=shards,
            gather_dtype=gather,
            chained=chains > 0,
            micro_batches=max(1, chains),
        )
        slots = slots if stage else slots[:1]
        try:
            memories = [on(slot=slot) for slot in slots]
        except Exception as error:
            self._note_on_cpu("the optimizer runs", "it", error)
            memories = [on(slot=slot, device="cpu") for slot in slots]
        return Memory(*map(max, zip(*map(astuple, memories), strict=True)))

    def _hook(self, plan: Sequence[Bucket], topology: Topology) -> int:
        """Return the most that a rank's hook keeps: what it has not sent yet."""
        hook = compression.select_hook(self._options.comm.compress, None)
        if not isinstance(hook, Int8Hook) or len(topology.nodes) == 1:
            return 0
        return max(
            sum(2 * (b.bounds[high] - b.bounds[low]) * max(FP32, b.dtype.itemsize) for b in plan)
            for low, high in pairwise(topology.lane_slots)
        )

    # A forward and backward.

    def _measure_activations(self, precision: str, samples: int) -> int | None:
        """Return the bytes of a micro-batch's forward and backward, or None if it fails."""
        task, dtypes, recompute = self._task, PRECISIONS[precision], self._options.train.recompute
        model = self._model(dtypes.parameters)
        try:
            batch = self._batch(samples)
            return activations.activation_bytes(task, model, batch, dtypes, recompute=recompute)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._note(f"activations are unknown, without memory for tensors: {reason}")
            return None

    def _batch(self, samples: int) -> Any:
        """Return the first samples of the training data as a batch."""
        if isinstance(self._train, IterableDataset):
            drawn = list(islice(iter(self._train), samples))
        else:
            drawn = [self._train[index % len(self._train)] for index in range(samples)]
        return (self._task.collate or default_collate)(drawn)

    def _note_on_cpu(self, what: str, subject: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._note(f"{what} on the CPU, since {subject} needs memory: {reason}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def smallest(jobs: Sequence[PlannedJob], memory: int) -> PlannedJob | None:
    """Return the job of the fewest ranks, and then the lowest stage, whose ranks have `memory`."""
    return next((job for job in jobs if job.total <= memory), None)
