"""Exact means of a loss and of metrics over micro-batches and ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mntrain.errors import TrainingStoppedError
from mntrain.tasks import Loss, Losses, Max, Mean, Metric, loss_of
from zero.collectives import Collectives, gather_objects
from zero.step_message import StepMessage

Kind = Literal["mean", "sum", "max", "addend"]  # an addend of the loss is a mean, too


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # of the task, without means over no items
    count: int  # items that the loss counts
    nonfinite: str  # "nan on rank 1" if the loss is not finite, else ""
    # What adds up to the loss, with numbers of items: that of a `Loss`, or the parts of `Losses`.
    addends: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Total(NamedTuple):
    """A sum, with the number of items that it is over, or a maximum."""

    kind: Kind
    value: Tensor | float
    items: float


class NamedTotals:
    """Totals by name over micro-batches, reduced over a group of ranks in a `StepMessage`.

    Ranks may lack some names. A message has those that all ranks know; if a rank has another one,
    the names are gathered, and a message is sent once more. `rank` is this rank in the world.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[Sequence[int], dict[str, Kind]] = {}  # of a group's ranks, sorted
        self.own: dict[str, Total] = {}

    def add(self, name: str, kind: Kind, value: Tensor, items: float) -> None:
        """Add the total of a micro-batch. Local; does not wait for a device."""
        if name in self.own:
            kind, before, count = self.own[name]
            before = torch.as_tensor(before).to(value.device)
            value = (torch.maximum if kind == "max" else torch.add)(before, value)
            items += count
        self.own[name] = Total(kind, value, items)

    def put(self, message: StepMessage, ranks: Sequence[int]) -> None:
        """Put what is added until the message is sent to the ranks of a group. Local."""
        kinds = self._known.setdefault(ranks, {})
        message.put("unknown names", partial(self._lacks, kinds))
        for name, kind in kinds.items():
            message.put(
                f"total of {name}",
                partial(self._value, name, -math.inf if kind == "max" else 0.0),
                "max" if kind == "max" else "sum",
            )
            message.put(f"items of {name}", partial(self._items, name, float(kind == "sum")))

    def take(
        self, message: StepMessage, group: Collectives, ranks: Sequence[int], where: str
    ) -> dict[str, Total]:
        """Return the totals over ranks, and start anew. Collective.

        Raises TrainingStoppedError, which names `where`, for a metric that ranks reduce in two
        ways.
        """
        while (sums := message.read())["unknown names"]:
            own = {name: total.kind for name, total in self.own.items()}
            self._learn(ranks, gather_objects(group, own), where)
            message = StepMessage()
            self.put(message, ranks)
            message.send(group)
        self.own.clear()
        return {
            name: Total(kind, sums[f"total of {name}"], sums[f"items of {name}"])
            for name, kind in self._known[ranks].items()
        }

    def _lacks(self, kinds: Mapping[str, Kind]) -> bool:
        return any(kinds.get(name) != total.kind for name, total in self.own.items())

    def _value(self, name: str, nothing: float) -> Tensor | float:
        return self.own[name].value if name in self.own else nothing

    def _items(self, name: str, nothing: float) -> float:
        return self.own[name].items if name in self.own else nothing

    def _learn(
        self, ranks: Sequence[int], by_rank: Iterable[Mapping[str, Kind]], where: str
    ) -> None:
        """Add the names of all ranks to those that this rank knows."""
        kinds = dict(self._known[ranks])
        for own in by_rank:
            for name, kind in own.items():
                if kinds.setdefault(name, kind) != kind:
                    raise TrainingStoppedError(
                        f"{where}, the metric {name} is a {kind}, and was a {kinds[name]}: reduce "
                        "it in one way",
                        self._rank,
                    )
        self._known[ranks] = dict(sorted(kinds.items()))


class StepMeans:
    """The loss and metrics of a job, added up over micro-batches, and reduced over a group.

    `rank` is this rank in the world, for errors. In the methods, `ranks` are those of the group,
    which by default is the world.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._totals = rank, NamedTotals(rank)

    def add(self, count: int, metrics: Mapping[str, Metric]) -> None:
        """Add a micro-batch of `count` items. Local; does not wait for a device."""
        for name, metric in metrics.items():
            given = Mean(metric, count) if isinstance(metric, Tensor) else metric
            value = torch.as_tensor(given.value).detach().to(torch.float64)
            if isinstance(given, Mean):
                if given.count or given is metric:
                    self._totals.add(name, "mean", _sum_of(value, given.count), given.count)
            else:
                self._totals.add(name, "max" if isinstance(given, Max) else "sum", value, 1.0)

    def add_loss(self, loss: Loss | Losses) -> None:
        """Add what a task has returned for a micro-batch. Local; does not wait for a device."""
        if isinstance(loss, Loss):
            self.add(loss.count, {"loss": loss.mean, **loss.metrics})
            return
        self.add(0, {**loss.parts, **loss.metrics})
        values = []
        for name, part in loss.parts.items():
            value = torch.as_tensor(part.value).detach().to(torch.float64)
            values.append(_sum_of(value, part.count) * loss.factors.get(name, 1.0))
            self._totals.add(loss_of(name), "addend", values[-1], part.count)
        items = sum(part.count for part in loss.parts.values())
        count = items if loss.items is None else loss.items
        self._totals.add("loss", "mean", torch.stack(values).sum(), count)

    def put(self, message: StepMessage, ranks: Sequence[int] = ()) -> None:
        """Put what is added until the message is sent. Local."""
        self._totals.put(message, ranks)

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
        own_loss = self._totals.own.get("loss")
        totals = self._totals.take(message, group, ranks, where)
        own_items = totals.get("loss", Total("mean", 0.0, 0.0)).items
        means = {
            name: (float(value) if kind in ("sum", "max") else float(value) / items, items)
            for name, (kind, value, items) in totals.items()
            if items
        }
        parts = {name for name, total in totals.items() if total.kind == "addend"}
        whole = means.pop("loss", None)
        addends = {"loss": whole} if whole and not parts else {}
        addends |= {name: means.pop(name) for name in sorted(parts & means.keys())}
        if not addends and not ranks:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", self._rank
            )
        loss = sum((value for value, _ in addends.values()), 0.0) if addends else math.nan
        nonfinite = ""
        if addends and not math.isfinite(loss):
            losses = gather_objects(group, float(own_loss.value) if own_loss else 0.0)
            by_rank = zip(ranks or range(group.size), losses, strict=True)
            culprits = [f"{x} on rank {r}" for r, x in by_rank if not math.isfinite(x)]
            nonfinite = ", ".join(culprits) or f"{loss} over all ranks"
        metrics = {name: value for name, (value, _) in means.items()}
        return GlobalMeans(loss, metrics, int(own_items), nonfinite, addends)


def _sum_of(mean: Tensor, items: float) -> Tensor:
    """Return the sum that a mean stands for; that of a mean over nothing is NaN."""
    return mean * items if items else torch.zeros_like(mean)
