"""The optimizer by which each parameter of this process is trained: one at a time.

Two optimizers that reduce the gradient of one parameter would both take it from `parameter.grad`.
So an optimizer that is given a parameter closes the one that has trained it so far. That does not
depend on who still holds the old one, or on garbage collection: all ranks close it at one point.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from zero.exchange.schedule import SyncSchedule


class Trainer(Protocol):
    """An optimizer that can be told to stop."""

    schedule: SyncSchedule
    closed: bool

    def finish_gathers(self) -> None:
        """Wait for parameters in flight."""

    def give_up(self, name: str) -> None:
        """Close, since another optimizer trains the parameter of a name from now on."""


_KEY = "zero: optimizer"


def check_free(parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueError for a parameter whose optimizer cannot be replaced. Local."""
    for name, holder in _holders(parameters):
        if holder.schedule.replicas > 1:
            raise ValueError(
                f"parameter {name} is trained by an optimizer with sync=, and may differ between "
                "nodes: call exchange() and close() of that optimizer before another is made"
            )


def finish_gathers(parameters: Mapping[str, Parameter]) -> None:
    """Wait until parameters hold what the optimizers that have trained them have sent. Local."""
    for _, holder in _holders(parameters):
        holder.finish_gathers()


def take_over(optimizer: Trainer, parameters: Mapping[str, Parameter]) -> None:
    """Let an optimizer train parameters, by name; close the others that did. Local."""
    for name, holder in _holders(parameters):
        holder.give_up(name)
    for parameter in parameters.values():
        accumulation_node(parameter).metadata[_KEY] = optimizer


def accumulation_node(parameter: Parameter) -> Any:
    """Return the node of autograd that accumulates into `parameter.grad`.

    Its hooks run after all hooks on the parameter, which may change the gradient. Autograd keeps
    it only while it is in use: so does an optimizer, until it is closed.
    """
    with torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    assert function is not None, "the parameter requires a gradient"
    return function.next_functions[0][0]


def _holders(parameters: Mapping[str, Parameter]) -> list[tuple[str, Trainer]]:
    """Return the optimizers that train parameters now, each with the name of the first of these."""
    found: dict[int, tuple[str, Trainer]] = {}
    for name, parameter in parameters.items():
        holder = accumulation_node(parameter).metadata.get(_KEY)
        if holder is not None and not holder.closed:
            found.setdefault(id(holder), (name, holder))
    return list(found.values())
