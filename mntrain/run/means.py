"""Means and sums over ranks in own loops and jobs."""

import math
from collections.abc import Callable, Mapping
from numbers import Complex
from typing import SupportsFloat

import torch
from torch import Tensor

from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import AgreedError, combined_refusals
from mntrain.ranks import as_reals, wide_dtype
from zero.optimizer import ZeroOptimizer
from zero.step_message import StepMessage


def weighted_mean(
    collectives: WorldCollectives, value: complex | Tensor, weight: float
) -> complex | Tensor:
    """Return the mean of all ranks' values by weight. Collective. See `World.mean`."""
    problem, dtype = weight_problem(weight), wide_dtype(value)
    number: complex | Tensor | None = value
    if not isinstance(value, Tensor):
        is_complex = dtype.is_complex and isinstance(value, Complex)
        number = complex(value) if is_complex else to_float(value)
    if number is None:
        problem, number = f"the value is {value!r}: give a number or a tensor", 0.0
    own = torch.as_tensor(number, dtype=dtype, device="cpu").detach().contiguous()
    parts = as_reals(own)
    sums = torch.zeros(parts.numel() + 1, dtype=torch.float64, device="cpu")
    if problem:
        sums[-1] = math.nan  # which all ranks see in the sum
    elif weight:
        sums[:-1], sums[-1] = parts * weight, weight
    collectives.all_reduce(sums).wait()
    total = float(sums[-1])
    if not total > 0:
        problems = collectives.gather_objects(problem, "world.mean").wait()
        text = combined_refusals(problems) if any(problems) else "the weights of all ranks are 0"
        raise AgreedError(f"world.mean: {text}", collectives.rank)
    mean = torch.empty_like(own)
    as_reals(mean).copy_(sums[:-1] / total)
    return mean.to(value.device) if isinstance(value, Tensor) else mean.item()


def to_float(value: object) -> float | None:
    """Return a real number, or a tensor's only element, as a float; None for anything else."""
    if wide_dtype(value).is_complex:
        return None
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError):  # of an array
        return None


def weight_problem(weight: object) -> str | None:
    """Return why something is no weight of a rank's values, or None if it is one. Local."""
    number = to_float(weight)
    if number is not None and 0 <= number < math.inf:
        return None
    return f"weight is {weight!r}: give a finite number of samples or tokens, 0 or more"


class DelayedSums:
    """Sums over all ranks that are started in one step of an own loop, and read in the next.

    They travel in the message that ends the next reduction of gradients over all ranks. If there is
    none, or it was not sent until they are read, in one of their own.
    """

    def __init__(
        self, collectives: WorldCollectives, name: str, latest: Callable[[], ZeroOptimizer | None]
    ) -> None:
        """Make sums of a `name` that no others have, the same on all ranks. Local.

        `latest` returns the optimizer that takes the steps of the loop, if there is one.
        """
        self._collectives, self._name, self._latest = collectives, name, latest
        self._steps: int | None = None  # of the optimizer, when it was last asked
        self._values: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._message: StepMessage | None = None
        self.by_rank: dict[str, dict[str, float]] = {}
        """The own values of each rank with the sums that were last read, by name and rank."""

    def due(self) -> bool:
        """Return whether sums may start now. Local; asked after each step, alike on all ranks.

        Nothing crosses nodes within a round of a sync schedule, unless the loop takes no steps.
        """
        optimizer = self._latest()
        if optimizer is None:
            return True
        schedule, steps = optimizer.schedule, optimizer.accumulation.steps
        before, self._steps = self._steps, steps
        ended = before is not None and schedule.rounds(steps) > schedule.rounds(before)
        return not schedule.alone(steps) or ended or steps == before

    @property
    def delay(self) -> int:
        """The most steps from now to the one in which sums are read, if they are due. Local."""
        optimizer = self._latest()
        alone = optimizer and optimizer.schedule.alone(optimizer.accumulation.steps)
        return 1 + optimizer.schedule.every if optimizer and alone else 1

    def start(self, values: Mapping[str, float], own: Mapping[str, float] | None = None) -> None:
        """Start sums of values by name. Collective; the same names in the same order.

        All ranks learn the values in `own` of each.
        """
        self._values, self._own = dict(values), dict(own or {})
        optimizer = self._latest()
        if optimizer is None or optimizer.group.size != self._collectives.size:
            self._message = self._send()
        else:
            self._message = optimizer.accumulation.message
            self._put(self._message)

    def take(self) -> dict[str, float]:
        """Return the sums that were last started, once; empty if there are none. Collective."""
        message, self._message = self._message, None
        if message is None:
            return {}
        if message.ranks != self._collectives.size:
            if not message.sent:
                for name in [*self._values, *self._own]:
                    message.take_back(self._full(name))
            message = self._send()
        sums = message.read()
        self.by_rank = {name: message.by_rank(self._full(name)) for name in self._own}
        return {name: sums[self._full(name)] for name in self._values}

    def _send(self) -> StepMessage:
        message = StepMessage()
        self._put(message)
        message.send(self._collectives)
        return message

    def _put(self, message: StepMessage) -> None:
        for name, value in self._values.items():
            message.put(self._full(name), value)
        for name, value in self._own.items():
            message.put(self._full(name), value, "max")

    def _full(self, name: str) -> str:
        return f"{self._name}: {name}"
