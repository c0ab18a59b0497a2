"""What a training job needs to know of a model and its data: a `Task` of three methods."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset

from mntrain.config import Config

Split = Literal["train", "valid"]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a task makes of one micro-batch.

    The mean over all ranks and micro-batches weighs each `mean` by its `count`, so it is the
    mean over all items, however unevenly they were dealt.
    """

    mean: Tensor
    """0-dim, the mean over `count` items; the one that `backward` is called on."""
    count: int
    """Items behind the mean: samples, or tokens."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further 0-dim means over the same items, such as the accuracy."""


class Task(ABC):
    """A model, its data and its loss; derive from it for a model of your own.

    The constructor takes the job's configuration, the same on all ranks, and all three methods
    must give the same on all ranks. A task knows no rank and communicates with nobody.
    """

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None for torch's `default_collate`.

    It travels to data-loader workers, so it must be picklable where they are spawned: a module's
    function, or a static method.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, on the CPU. Torch is seeded alike on all ranks before the call."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any]:
        """Return the map-style dataset (`len` and indexing) of a split, picklable for workers."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of one collated micro-batch, which is already on the model's device.

        With 16-bit parameters its floating-point tensors are in the model's dtype.
        """

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return what the model computes for one item that `Loss` counts, or None if unknown.

        Floating-point operations of a forward and a backward, a multiplication and an addition each
        one, without what is computed again. With it the job reports how much of its GPUs it used.
        """
        return None

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of the model that --train.compile compiles, each by itself.

        The gradients of a part all come when its backward ends. So with one part nothing is sent
        during backward; layers of one kind take no longer to compile than one. By default the
        modules in each ModuleList that is not within another, and what else there is stays as it
        is; a model without a ModuleList is one part.
        """
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        parts = {part: None for modules in lists for part in modules if part not in lists}
        within = {inner for part in parts for inner in part.modules() if inner is not part}
        return [part for part in parts if part not in within] or [model]

    def sample(self, model: nn.Module) -> str | None:
        """Return a text to show when training has ended, or None. Called on one rank only."""
        return None
