"""Tasks: a model, its datasets and its loss. `load` imports one by name."""

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset

from mntrain.config import Config

__all__ = ["Loss", "Split", "Task", "load"]

Split = Literal["train", "valid"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss and metrics of one micro-batch.

    Means over ranks and micro-batches are weighted by `count`. They are therefore means over all
    items, however unevenly the items are distributed.
    """

    mean: Tensor  # over `count` items, 0-dim; `backward` is called on it
    count: int  # of items: samples, or tokens
    metrics: dict[str, Tensor] = field(default_factory=dict)  # further means, such as the accuracy


class Task(ABC):
    """Base class of a model with its data and its loss.

    The constructor takes the job's configuration, which is equal on all ranks but for what
    `mntrain.config.MAY_DIFFER` names. All three abstract methods must return equal results on all
    ranks. A task knows no rank and does not communicate.
    """

    # Makes a batch of a list of samples; None for torch's `default_collate`. It must be picklable
    # for spawned data-loader workers: a module's function, or a static method.
    collate: Callable[[list[Any]], Any] | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, on the CPU. Torch's seed before the call is equal on all ranks."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | None:
        """Return the map-style dataset (`len` and indexing) of a split, picklable for workers.

        None or an empty one for "valid": no validation.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of one collated micro-batch.

        The batch is on the model's device. If the parameters are of 16 bits, its floating-point
        tensors have the dtype of the parameters.
        """

    def compared_files(self) -> Mapping[str, Path]:
        """Return files of the data, by a name that is the same on all nodes.

        At the start, ranks compare the files' sizes and parts of their contents, besides the
        lengths of the datasets and a few samples. The default is no file.
        """
        return {}

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return the FLOPs of one item that `Loss` counts, forward and backward, or None.

        A multiplication and an addition are two operations; recomputation is not counted. The job
        reports the utilisation of its GPUs from it.
        """
        return None

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the submodules that --train.compile compiles, each separately.

        All gradients of a compiled region become ready when its backward ends. With a single
        region, communication would not overlap backward. Equal layers are compiled only once. The
        default regions are the modules of each outermost ModuleList; other modules are not
        compiled. A model without a ModuleList is one region.
        """
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        regions = {item: None for modules in lists for item in modules if item not in lists}
        nested = {inner for item in regions for inner in item.modules() if inner is not item}
        return [item for item in regions if item not in nested] or [model]

    def sample(self, model: nn.Module) -> str | None:
        """Return a text to print when training has ended, or None. Called on one rank only."""
        return None


def load(name: str, config: Config) -> Task:
    """Return a new task by name: "lm", or "package.module:Class" for one of your own.

    The current directory is added to sys.path, as `python -m` does, and stays there: data-loader
    workers import the class again. Raises ValueError for a name that is not of a task. Exceptions
    of the task's constructor are not caught.
    """
    full_name = "mntrain.tasks.lm:LanguageModel" if name == "lm" else name
    module_name, _, class_name = full_name.partition(":")
    if not module_name or not class_name or module_name.startswith("."):
        raise ValueError(f'task {name!r} is neither "lm" nor of the form "package.module:Class"')
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"task {name!r}: module {module_name!r} does not import: "
            f"{type(error).__name__}: {error} (searched from {folder})"
        ) from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ValueError(
            f"task {name!r}: module {module_name!r} has no class {class_name!r} that derives from "
            "mntrain.tasks.Task"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ValueError(f"task {name!r}: {class_name} lacks {', '.join(missing)}")
    task = found(config)
    if task.collate is not None and not _takes_arguments(task.collate):
        raise ValueError(
            f"task {name!r}: collate of {class_name} gets the list of samples, but has no argument "
            "for it: make it a @staticmethod"
        )
    return task


def _takes_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function takes any argument; True if its signature is not known."""
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of some functions in C
        return True


def check_loss(loss: object, task: str) -> None:
    """Raise TypeError with what to return unless a task's `loss` has returned a `Loss`. Local."""
    fix = "return mntrain.tasks.Loss(mean, count, metrics)"
    if not isinstance(loss, Loss):
        raise TypeError(f"loss() of --task {task} returned a {type(loss).__name__}: {fix}")
    for name, value in {"mean": loss.mean, **loss.metrics}.items():
        if not isinstance(value, Tensor) or value.dim():
            given = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"loss() of --task {task}: {name} is {given}, and must be a tensor of no dimension"
            )
    if not isinstance(loss.count, Integral) or loss.count < 0:
        raise TypeError(
            f"loss() of --task {task}: count is {loss.count!r}, and must be the number of items "
            "that the mean is over, an int"
        )
