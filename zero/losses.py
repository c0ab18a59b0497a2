"""Changes of the losses that run backward now: what other optimizers need to know of them.

A backward may reach parameters of several optimizers. Autograd gives each one a number, also those
of other threads that run at the same time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.autograd.variable import Variable
from torch.utils.hooks import RemovableHandle


class ChangedLoss:
    """Changes of the loss of a running backward. None: not changed so."""

    def __init__(self) -> None:
        self.scale: float | None = None  # by which the latest optimizer has multiplied it
        self.weighed: tuple[object, float] | None = None  # for whose mean, and how it counts there

    def __call__(self) -> None:
        """Do nothing: autograd calls it at the end of the backward, and keeps it until then."""


RUNNING: WeakValueDictionary[int, ChangedLoss] = WeakValueDictionary()
"""The changed losses of running backward passes, by autograd's number of each."""


def note_scale(loss: Tensor, scale: float, begun: Callable[[], None]) -> None:
    """Let backward passes of a loss know by how much it was multiplied, and call `begun`. Local."""
    if loss.requires_grad:
        loss.register_hook(partial(_note_scale, scale, begun))


def note_weight(nodes: Sequence[Node], owner: object, weight: float) -> list[RemovableHandle]:
    """Let a backward from these nodes know that its loss counts by a weight in `owner`'s mean."""
    return [node.register_prehook(partial(_note_weight, (owner, weight))) for node in nodes]


def _note_scale(scale: float, begun: Callable[[], None], _: Tensor) -> None:
    _changes().scale = scale
    begun()


def _note_weight(weighed: tuple[object, float], _: object) -> None:
    _changes().weighed = weighed


def _changes() -> ChangedLoss:
    """Return the changes of the loss of the backward that has called this."""
    task = torch._C._current_graph_task_id()
    found = RUNNING.get(task)
    if found is None:
        found = RUNNING[task] = ChangedLoss()
        Variable._execution_engine.queue_callback(found)
    return found
