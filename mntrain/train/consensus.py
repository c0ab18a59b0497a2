"""Results that ranks establish together: exact means, and whether their replicas are equal."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from mntrain.errors import TrainingStoppedError
from mntrain.metrics.registry import METRICS
from mntrain.ranks import Ranks
from mntrain.tasks import Loss, Losses, Max, Mean, Metric, loss_of
from zero.collectives import Collectives, gather_objects


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks, and other reduced values: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # of the task, without means over no items
    count: int  # items that the loss counts; 0 if a rank failed
    values: dict[str, float]  # the other values, reduced
    nonfinite: str  # "nan on rank 1" if the loss is not finite, else ""
    # What adds up to the loss, with numbers of items: that of a `Loss`, or the parts of `Losses`.
    addends: Mapping[str, tuple[float, float]] = field(default_factory=dict)


_Kind = Literal["mean", "sum", "max", "addend"]  # an addend of the loss is a mean, too
# Value and count of a rank that has seen none.
_NOTHING: dict[_Kind, tuple[float, float]] = {
    "mean": (0.0, 0.0),
    "addend": (0.0, 0.0),
    "sum": (0.0, 0.0),
    "max": (-math.inf, 0.0),
}


@dataclass(frozen=True)
class _Total:
    """Value of a metric on one rank: a sum and the items it is over, a sum, or a maximum."""

    kind: _Kind
    value: Tensor  # fp64, 0-dim
    count: float = 0.0

    def __add__(self, other: "_Total") -> "_Total":
        together = torch.maximum if self.kind == "max" else torch.add
        value = together(self.value, other.value.to(self.value.device))
        return replace(self, value=value, count=self.count + other.count)


def _total(metric: Metric, count: int) -> _Total:
    """Return the total of a micro-batch's metric; `count` is that of a mean without its own."""
    if isinstance(metric, Tensor):
        metric = Mean(metric, count)
    value = torch.as_tensor(metric.value).detach().to(torch.float64)
    if isinstance(metric, Mean):
        total = value * metric.count if metric.count else torch.zeros_like(value)  # not nan
        return _Total("mean", total, metric.count)
    return _Total("max" if isinstance(metric, Max) else "sum", value)


class MeanAccumulator:
    """Adds up a loss and metrics over micro-batches, and reduces them over a group of ranks.

    The first reduction also gathers the names of the task's metrics, so that a rank without a
    sample of its own knows them too. `rank` is this rank in the world, for errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Of all ranks of a group, by name, sorted; () stands for the world.
        self._known: dict[tuple[int, ...], dict[str, _Kind]] = {}
        self._totals: dict[str, _Total] = {}

    def add(self, count: int, metrics: Mapping[str, Metric]) -> None:
        """Add a micro-batch of `count` items. Local; does not wait for a device."""
        for name, metric in metrics.items():
            if not isinstance(metric, Tensor) or count:
                self._add(name, _total(metric, count))

    def add_loss(self, loss: Loss | Losses) -> None:
        """Add what a task has returned for a micro-batch. Local; does not wait for a device."""
        if isinstance(loss, Loss):
            self.add(loss.count, {"loss": loss.mean, **loss.metrics})
            return
        self.add(0, {**loss.parts, **loss.metrics})
        values = []
        for name, part in loss.parts.items():
            total = _total(part, part.count)
            values.append(total.value * loss.factors.get(name, 1.0))
            self._add(loss_of(name), _Total("addend", values[-1], part.count))
        items = sum(part.count for part in loss.parts.values())
        count = items if loss.items is None else loss.items
        self._add("loss", _Total("mean", torch.stack(values).sum(), count))

    def _add(self, name: str, total: _Total) -> None:
        self._totals[name] = self._totals[name] + total if name in self._totals else total

    def reduce(
        self,
        group: Collectives,
        where: str,
        local_values: Mapping[str, float] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> GlobalMeans:
        """Return the means over all ranks of the group, and start anew. Collective in the group.

        By default the group is the world. Otherwise `ranks` are its ranks, for errors, and it may
        have no items: then the loss is NaN.

        `local_values`, under the same names on every rank, travel in the same message. Each is
        reduced as its metric declares; those that are no metrics are summed. If the sum of "failed"
        is above 0, there are no means, only values. Raises TrainingStoppedError, which names
        `where`, if no rank of the world has counted any item, and for a metric that ranks reduce in
        two ways.
        """
        totals, self._totals = self._totals, {}
        local, local_values = _numbers(totals), local_values or {}
        own = {name: total.kind for name, total in totals.items()}
        key = tuple(ranks or ())
        while True:
            kinds = self._known.setdefault(key, {})
            encoded = [float(any(kinds.get(n) != kind for n, kind in own.items()))]
            for name, kind in kinds.items():
                encoded += _encode(kind, *local.get(name, _NOTHING[kind]), group)
            for name, value in local_values.items():
                encoded += _encode("max" if _is_maximum(name) else "sum", value, 0, group)
            summed = torch.tensor(encoded, dtype=torch.float64)
            group.all_reduce(summed).wait()
            sums = iter(summed.tolist())
            if not next(sums):
                break
            self._known[key] = self._agree_on_kinds(kinds, gather_objects(group, own), where)
        reduced = {n: _decode(kind, sums, group.size) for n, kind in kinds.items()}
        values = {
            name: _decode("max" if _is_maximum(name) else "sum", sums, group.size)[0]
            for name in local_values
        }
        if values.get("failed"):
            return GlobalMeans(math.nan, {}, 0, values, "")

        own_loss = reduced.pop("loss", (0.0, 0.0))
        parts = [name for name, kind in kinds.items() if kind == "addend"]
        addends = {name: reduced.pop(name) for name in parts} or {"loss": own_loss}
        addends = {name: (value, items) for name, (value, items) in addends.items() if items}
        if not addends and ranks is None:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", self._rank
            )
        metrics = {name: value for name, (value, items) in reduced.items() if items}
        loss = sum((value for value, _ in addends.values()), 0.0) if addends else math.nan
        nonfinite = ""
        if addends and not math.isfinite(loss):
            losses = gather_objects(group, local.get("loss", _NOTHING["mean"])[0])
            by_rank = zip(ranks or range(group.size), losses, strict=True)
            nonfinite = _name_non_finite(loss, by_rank)
        return GlobalMeans(loss, metrics, int(own_loss[1]), values, nonfinite, addends)

    def _agree_on_kinds(
        self, known: Mapping[str, _Kind], by_rank: Sequence[Mapping[str, _Kind]], where: str
    ) -> dict[str, _Kind]:
        """Return how each metric is reduced, with those that this rank has not seen."""
        kinds = dict(known)
        for own in by_rank:
            for name, kind in own.items():
                if kinds.setdefault(name, kind) != kind:
                    raise TrainingStoppedError(
                        f"{where}, the metric {name} is a {kind}, and was a {kinds[name]}: reduce "
                        "it in one way",
                        self._rank,
                    )
        return dict(sorted(kinds.items()))


def _numbers(totals: Mapping[str, _Total]) -> dict[str, tuple[float, float]]:
    """Return the values and counts of totals by name. Waits for the device, once."""
    if not totals:
        return {}
    device = next(iter(totals.values())).value.device
    values = torch.stack([total.value.to(device) for total in totals.values()]).tolist()
    return {n: (v, total.count) for (n, total), v in zip(totals.items(), values, strict=True)}


def _encode(kind: _Kind, value: float, count: float, group: Collectives) -> list[float]:
    """Return what to sum over ranks for a value: a maximum needs a place for each rank."""
    if kind == "max":
        return [value if rank == group.rank else 0.0 for rank in range(group.size)]
    return [value] if kind == "sum" else [value, count]


def _decode(kind: _Kind, sums: Iterator[float], size: int) -> tuple[float, float]:
    """Return a reduced value, and the number of items that it is over: 0 if there is no value."""
    if kind == "max":
        largest = max(islice(sums, size))
        return largest, float(largest > -math.inf)
    value = next(sums)
    if kind == "sum":
        return value, 1.0
    count = next(sums)
    return value / count if count else math.nan, count


def _name_non_finite(loss: float, by_rank: Iterable[tuple[int, float]]) -> str:
    """Return which ranks' losses are not finite, in words."""
    culprits = [f"{x} on rank {r}" for r, x in by_rank if not math.isfinite(x)]
    return ", ".join(culprits) or f"{loss} over all ranks"


def _is_maximum(name: str) -> bool:
    return name in METRICS and METRICS[name].reduction == "max"


@torch.no_grad()
def model_digest(model: nn.Module) -> str:
    """Return a hash of the bits of all parameters and buffers. Local; copies a tensor at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous().view(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differing_ranks(
    digests: Sequence[str], groups: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the ranks whose digest is not the most common one of their group. Pure.

    `digests` is by rank; `groups` are by default one of all ranks. If two digests are equally
    common, that of the group's first rank counts as right.
    """
    differing = []
    for group in groups or [range(len(digests))]:
        counts = Counter(digests[rank] for rank in group)
        expected = max(counts, key=lambda d: (counts[d], d == digests[group[0]]))
        differing += [rank for rank in group if digests[rank] != expected]
    return sorted(differing)


def compare_replicas(
    world: Ranks, model: nn.Module, groups: Sequence[Sequence[int]] | None, step: int
) -> None:
    """Raise TrainingStoppedError if ranks of a group, by default all, do not agree. Collective."""
    if ranks := differing_ranks(world.gather(model_digest(model)), groups):
        raise TrainingStoppedError(
            f"after step {step}, the weights differ between ranks: "
            f"rank {', '.join(map(str, ranks))} against the others",
            world.rank,
        )
