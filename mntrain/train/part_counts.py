"""The parts of `Losses`, each weighted by its number of items in the whole step.

    counts of all micro-batches --- sum over ranks ---+
                                                      v
    forward of the first micro-batch -------------> weigh -> backward -> forward -> weigh -> ...

The gradient of a mean over all items needs their number before the first backward. Ranks sum it
while the first forward is running.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from mntrain.metrics.registry import StepTimer
from mntrain.tasks import Loss, Losses, Task, check_loss
from mntrain.train.step_means import NamedTotals
from zero.collectives import Collectives
from zero.step_message import StepMessage


class PartCounts:
    """The numbers of items of each part of a task's `Losses` in a step, over its ranks.

    A task that does not override `counts` returns `Loss`, and needs no communication. Otherwise
    there is one small all-reduce in a step. `name` is that of the task, for errors. `group` returns
    the ranks that the current step is averaged over.
    """

    def __init__(self, task: Task, name: str, group: Callable[[], Collectives]) -> None:
        self._task, self._name, self._choose_group = task, name, group
        self._group: Collectives  # of this step
        self._has_parts = getattr(task.counts, "__func__", None) is not Task.counts
        self._own = deque[Mapping[str, int]]()  # of micro-batches that have no backward yet
        self._sums = NamedTotals(0)
        self._message: StepMessage | None = None  # of this step
        self._totals: dict[str, float] | None = None  # of this step

    def start(self, micro_batches: Sequence[Any]) -> None:
        """Count the items of a step, and start their sum over ranks. Collective; does not wait.

        Raises TypeError if the task's `counts` returns anything but numbers of items by name.
        """
        if not self._has_parts:
            return
        for batch in micro_batches:
            self._own.append(self._checked_counts(self._task.counts(batch)))
        for counts in self._own:
            for name, count in counts.items():
                self._sums.add(name, "sum", torch.tensor(float(count), dtype=torch.float64), 1.0)
        self._launch()

    def checked(self, loss: Loss | Losses) -> Loss | Losses:
        """Return the loss. Raises TypeError if it is not what the task may return. Local."""
        check_loss(loss, self._name)
        if isinstance(loss, Losses) and not self._has_parts:
            counts = ", ".join(f'"{name}": ...' for name in loss.parts)
            raise TypeError(
                f"loss() of --task {self._name} returned Losses, but the task has no counts(), "
                "and backward needs the counts of the whole step: add a method counts(self, batch) "
                f"that returns {{{counts}}}"
            )
        if isinstance(loss, Loss) and self._has_parts:
            raise TypeError(
                f"loss() of --task {self._name} returned a Loss, but the task has counts(), which "
                "is for Losses: return mntrain.tasks.Losses, or remove counts()"
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
                share = part.count / totals[name] * (sum(totals.values()) / weight)
                value = torch.as_tensor(part.value)
                wide = value.to(torch.promote_types(value.dtype, torch.float32))
                scaled = scaled.to(wide.device) + wide * (share * loss.factors.get(name, 1.0))
        return scaled, weight

    def end_step(self) -> None:
        """End the sum over ranks, if this rank had no use for it, and forget it. Collective."""
        if self._has_parts:
            self._finish()
        self._own.clear()
        self._totals = None

    def finish_interrupted(self) -> None:
        """Take part in the sum of a step that raised an exception on this rank. Collective."""
        if self._has_parts and self._totals is None:
            if self._message is None:
                self._launch()
            self._finish()

    def _launch(self) -> None:
        self._group, self._message = (
            self._choose_group().named("counts of the losses"),
            StepMessage(),
        )
        self._sums.put(self._message, ())
        self._message.send(self._group)

    def _finish(self) -> dict[str, float]:
        """Return the sums over ranks of the step's counts, by name. Collective."""
        if self._totals is None:
            if self._message is None:
                raise RuntimeError("the counts of this step were not started")
            sums = self._sums.take(self._message, self._group, (), "counts")
            self._totals = {name: float(total.value) for name, total in sums.items()}
            self._message = None
        return self._totals

    def _checked_counts(self, counts: object) -> Mapping[str, int]:
        right = isinstance(counts, Mapping) and all(
            isinstance(name, str) and isinstance(count, Integral) and int(count) >= 0
            for name, count in counts.items()
        )
        if not right:
            raise TypeError(
                f"counts() of --task {self._name} returned {counts!r}: return a dictionary of the "
                "number of items, an int, by the name of each part"
            )
        return cast(Mapping[str, int], counts)

    def _compare(self, said: Mapping[str, int], loss: Losses) -> None:
        """Raise ValueError if the counts of a micro-batch are not those that ranks have summed."""
        found = {name: part.count for name, part in loss.parts.items()}
        for name in sorted(said.keys() | found.keys()):
            expected, count = said.get(name, 0), found.get(name, 0)
            if count != expected:
                raise ValueError(
                    f"loss() of --task {self._name} returned Losses with {count} items of the part "
                    f"{name}, but counts() said {expected} for the same batch: both must count "
                    "alike, so draw what is random, such as masks, in the dataset or in collate"
                )
