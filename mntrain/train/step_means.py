"""Exact means of a loss and of metrics over micro-batches and ranks."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mntrain.errors import TrainingStoppedError
from mntrain.run.named_sums import Kind, NamedSums, NamedValue
from mntrain.tasks import Loss, Max, Mean, Metric
from zero.collectives import Collectives, gather_objects
from zero.step_message import StepMessage


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # of the task, without means over no items
    count: int  # items that the loss counts
    nonfinite: str  # "nan on rank 1" if the loss is not finite, else ""


class StepMeans:
    """The loss and metrics of a job, added up over micro-batches, and reduced over a group.

    `rank` is this rank in the world, for errors. In the methods, `ranks` are those of the group,
    which by default is the world.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sums = defaultdict[Sequence[int], NamedSums](NamedSums)  # by the ranks of a group
        self._own: dict[str, NamedValue] = {}

    def add(self, count: int, metrics: Mapping[str, Metric]) -> None:
        """Add a micro-batch of `count` items. Local; does not wait for a device."""
        for name, metric in metrics.items():
            given = Mean(metric, count) if isinstance(metric, Tensor) else metric
            value = torch.as_tensor(given.value).detach().to(torch.float64)
            if isinstance(given, Mean):
                # The sum that it stands for; a mean over nothing is NaN.
                total = value * given.count if given.count else torch.zeros_like(value)
                self._add(name, "mean", total, given.count)
            else:
                self._add(name, "max" if isinstance(given, Max) else "sum", value, 1.0)

    def add_loss(self, loss: Loss) -> None:
        """Add what a task has returned for a micro-batch. Local; does not wait for a device."""
        self.add(loss.count, {"loss": loss.mean, **loss.metrics})

    def _add(self, name: str, kind: Kind, value: Tensor, items: float) -> None:
        if name in self._own:
            kind, before, count = self._own[name]
            combine = torch.maximum if kind == "max" else torch.add
            value = combine(torch.as_tensor(before).to(value.device), value)
            items += count
        self._own[name] = NamedValue(kind, value, items)

    def put(self, message: StepMessage, ranks: Sequence[int] = ()) -> None:
        """Put what is added until the message is sent. Local."""
        for name, term in self._sums[ranks].terms(self._own).items():
            message.put(name, *term)

    def reduce(self, group: Collectives, where: str) -> GlobalMeans:
        """Return the means over all ranks, in a message of their own. Collective."""
        message = StepMessage()
        self.put(message)
        message.send(group)
        return self.take(message, group, where)

    def take(
        self, message: StepMessage, group: Collectives, where: str, ranks: Sequence[int] = ()
    ) -> GlobalMeans:
        """Return the means over the ranks that a message was sent to, and start anew. Collective.

        Raises TrainingStoppedError, which names `where`, if no rank of the world has counted any
        item, and for a metric that ranks reduce in two ways. A smaller group may have no items:
        then the loss is NaN.
        """
        try:
            [reduced] = self._sums[ranks].take([self._own], [message.read()], group)
        except ValueError as error:
            raise TrainingStoppedError(f"{where}, {error}", self._rank) from None
        own_loss = self._own.get("loss")
        self._own.clear()
        whole = reduced.pop("loss", None)
        if whole is None and not ranks:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", self._rank
            )
        loss, nonfinite = float(whole.value) if whole else math.nan, ""
        if whole and not math.isfinite(loss):
            losses = gather_objects(group, float(own_loss.value) if own_loss else 0.0)
            by_rank = zip(ranks or range(group.size), losses, strict=True)
            culprits = [f"{x} on rank {r}" for r, x in by_rank if not math.isfinite(x)]
            nonfinite = ", ".join(culprits) or f"{loss} over all ranks"
        metrics = {name: float(one.value) for name, one in reduced.items()}
        return GlobalMeans(loss, metrics, int(whole.items) if whole else 0, nonfinite)
