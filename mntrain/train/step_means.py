"""Exact means of a loss and of metrics over micro-batches and ranks.

The gradient of a mean over all items of `Losses` needs their number before the first backward.
Ranks sum it while the first forward is running:

    counts of all micro-batches --- sum over ranks ---+
                                                      v
    forward of the first micro-batch -------------> weigh -> backward -> forward -> weigh -> ...
"""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mntrain.comm.engine import Future
from mntrain.comm.waits import Waits
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import TrainingStoppedError
from mntrain.metrics.registry import StepTimer
from mntrain.run.named_sums import Kind, NamedSums, NamedValue
from mntrain.tasks import Loss, Losses, Max, Mean, Metric, Task, check_loss, loss_of
from zero.collectives import Collectives, gather_objects
from zero.step_message import StepMessage


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # of the task, without means over no items
    count: int  # items that the loss counts
    nonfinite: str  # "nan on rank 1" if the loss is not finite, else ""
    # What adds up to the loss: that of a `Loss`, or the parts of `Losses`.
    addends: Mapping[str, NamedValue] = field(default_factory=dict)


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
                self._add(name, "mean", _sum_of(value, given.count), given.count)
            else:
                self._add(name, "max" if isinstance(given, Max) else "sum", value, 1.0)

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
            self._add(loss_of(name), "addend", values[-1], part.count)
        items = sum(part.count for part in loss.parts.values())
        self._add(
            "loss", "mean", torch.stack(values).sum(), items if loss.items is None else loss.items
        )

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
        parts = {name: one for name, one in reduced.items() if one.kind == "addend"}
        addends = parts or ({"loss": whole} if whole else {})
        if not addends and not ranks:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", self._rank
            )
        loss = sum(float(one.value) for one in addends.values()) if addends else math.nan
        nonfinite = ""
        if addends and not math.isfinite(loss):
            losses = gather_objects(group, float(own_loss.value) if own_loss else 0.0)
            by_rank = zip(ranks or range(group.size), losses, strict=True)
            culprits = [f"{x} on rank {r}" for r, x in by_rank if not math.isfinite(x)]
            nonfinite = ", ".join(culprits) or f"{loss} over all ranks"
        metrics = {name: float(one.value) for name, one in reduced.items() if name not in parts}
        return GlobalMeans(loss, metrics, int(whole.items) if whole else 0, nonfinite, addends)


def _sum_of(mean: Tensor, items: float) -> Tensor:
    """Return the sum that a mean stands for; that of a mean over nothing is NaN."""
    return mean * items if items else torch.zeros_like(mean)


class PartCounts:
    """The numbers of items of each part of a task's `Losses` in a step, over its ranks.

    A task that does not override `counts` returns `Loss`, and needs no communication. Otherwise
    small objects are gathered once in a step. `name` is that of the task, for errors. `group`
    returns the ranks that the current step is averaged over, and `waits` are those of this rank.
    """

    def __init__(
        self, task: Task, name: str, group: Callable[[], WorldCollectives], waits: Waits
    ) -> None:
        self._task, self._name, self._group, self._waits = task, name, group, waits
        self._has_parts = getattr(task.counts, "__func__", None) is not Task.counts
        self._begin_step()

    def _begin_step(self) -> None:
        self._own = deque[Mapping[str, int]]()  # of micro-batches that have no backward yet
        self._gathered: Future[list[Counter[str]]] | None = None
        self._totals: Counter[str] | None = None

    def start(self, micro_batches: Sequence[Any]) -> None:
        """Count the items of a step, and start their sum over ranks. Collective; does not wait.

        Raises TypeError if the task's `counts` returns anything but numbers of items by name.
        """
        if self._has_parts:
            self._own.extend(self._checked_counts(self._task.counts(b)) for b in micro_batches)
            self._launch()

    def checked(self, loss: Loss | Losses) -> Loss | Losses:
        """Return the loss. Raises TypeError if it is not what the task may return. Local."""
        check_loss(loss, self._name)
        if isinstance(loss, Losses) != self._has_parts:
            raise TypeError(
                f"loss() of --task {self._name} returned {type(loss).__name__}. A task that returns"
                " Losses must have counts(self, batch), which returns the number of items of each "
                "part by its name, and a task that returns a Loss must not: backward of Losses "
                "needs the counts of the whole step"
            )
        return loss

    def weigh(self, loss: Loss | Losses, timer: StepTimer) -> tuple[Tensor, float]:
        """Return a loss and its weight for `backward` of the optimizer. Collective.

        The mean of what is returned, over all micro-batches and ranks by weight, is the step's
        loss. Parts that are not in the micro-batch are left out, since NaN x 0 is NaN. Called once
        for each micro-batch, in their order, within the timer's phase "backward". Raises
        ValueError if `counts` said otherwise.
        """
        if isinstance(loss, Loss):
            return loss.mean, loss.count
        start = time.perf_counter()
        totals = self._finish()
        timer.move(time.perf_counter() - start, "backward", "reduce_wait")
        self._compare(self._own.popleft(), loss)
        weight = sum(part.count for part in loss.parts.values())
        scaled = torch.zeros(())
        for name, part in loss.parts.items():
            if part.count:
                share = part.count / totals[name] * (totals.total() / weight)
                value = torch.as_tensor(part.value)
                wide = value.to(torch.promote_types(value.dtype, torch.float32))
                scaled = scaled.to(wide.device) + wide * (share * loss.factors.get(name, 1.0))
        return scaled, weight

    def end_step(self) -> None:
        """End the sum over ranks, if this rank had no use for it, and forget it. Collective."""
        if self._has_parts:
            self._finish()
        self._begin_step()

    def finish_interrupted(self) -> None:
        """Take part in the sum of a step that raised an exception on this rank. Collective."""
        if self._has_parts:
            if self._gathered is None:
                self._launch()
            self._finish()

    def _launch(self) -> None:
        own = sum((Counter(counts) for counts in self._own), Counter[str]())
        self._gathered = self._group().gather_objects(own, "counts of the losses")

    def _finish(self) -> Counter[str]:
        if self._totals is None:
            assert self._gathered is not None
            with self._waits.waiting(gather=True):
                self._totals = sum(self._gathered.wait(), Counter[str]())
        return self._totals

    def _checked_counts(self, counts: object) -> Mapping[str, int]:
        if isinstance(counts, Mapping) and all(
            isinstance(name, str) and isinstance(count, Integral) and int(count) >= 0
            for name, count in counts.items()
        ):
            return counts
        raise TypeError(
            f"counts() of --task {self._name} returned {counts!r}: return a dictionary of the "
            "number of items, an int, by the name of each part"
        )

    def _compare(self, said: Mapping[str, int], loss: Losses) -> None:
        found = {name: part.count for name, part in loss.parts.items()}
        for name in sorted(said.keys() | found.keys()):
            expected, count = said.get(name, 0), found.get(name, 0)
            if count != expected:
                raise ValueError(
                    f"loss() of --task {self._name} returned Losses with {count} items of the part "
                    f"{name}, but counts() said {expected} for the same batch: both must count "
                    "alike, so draw what is random, such as masks, in the dataset or in collate"
                )
