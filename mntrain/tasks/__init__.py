"""Tasks: a model, its datasets and its loss. `load` imports one by name."""

import importlib
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from mntrain.metrics.registry import StepRecord
from mntrain.options.config import Config

__all__ = ["Loss", "Max", "Mean", "Metric", "Split", "Sum", "Task", "load"]

Split = Literal["train", "valid"]

_SHORT_NAMES = {"lm": "mntrain.tasks.lm:LanguageModel", "hf": "mntrain.tasks.hf:HuggingFaceTask"}
_CLASSIFIER = "mntrain.tasks.hf:HuggingFaceClassifier"  # of hf with --hf.head classification


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is a mean over items of its own, such as the tokens that are masked."""

    value: Tensor | float  # over `count` items, 0-dim
    count: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that is added up over micro-batches and ranks, such as a number of errors."""

    value: Tensor | float  # 0-dim


@dataclass(frozen=True, slots=True)
class Max:
    """A metric of which the largest value counts."""

    value: Tensor | float  # 0-dim


Metric = Tensor | Mean | Sum | Max


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss and metrics of one micro-batch.

    Means over ranks and micro-batches are weighted by their counts: they are means over all items.
    """

    mean: Tensor  # over `count` items, 0-dim; `backward` is called on it
    count: int  # of items: samples, or tokens
    # By name, such as the accuracy. A tensor is a mean over the same `count` items, 0-dim.
    metrics: dict[str, Metric] = field(default_factory=dict)


class Task(ABC):
    """Base class of a model with its data and its loss.

    The constructor takes the job's configuration, `config`, of which `train.steps` is None with
    --train.epochs, until `dataset` has returned the training data. All three abstract methods must
    return equal results on all ranks. A task knows no rank and does not communicate.
    """

    # Makes a batch of a list of samples; None for torch's `default_collate`. It must be picklable
    # for spawned data-loader workers: a module's function, or a static method.
    collate: Callable[[list[Any]], Any] | None = None
    # What losses count, as reports name it: "12,300 items/s".
    items: str = "items"

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, on the CPU. Torch's seed before the call is equal on all ranks."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | Mapping[str, Dataset[Any]] | None:
        """Return the map-style dataset (`len` and indexing) of a split, picklable for workers.

        For "train" also an IterableDataset, of which each sample goes to one rank and worker.
        For "valid" also None or an empty one, for no validation; or several by name. The loss and
        metrics of each are reported under its name, as in "news loss", and `eval_loss` is the mean
        over the items of all.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of one collated micro-batch.

        The batch is on the model's device. If the parameters are of 16 bits, its floating-point
        tensors have the dtype of the parameters.
        """

    def derive(self, loss: float, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics to report of a step or an evaluation, from those over all ranks.

        Such as figures that are no means: the perplexity, or a precision of two sums. Called on
        every rank. The default returns `metrics`.
        """
        return metrics

    def optimizer(self, model: nn.Module) -> "partial[Optimizer] | None":
        """Return an optimizer class with its groups and options, or None for that of --optim.

        As `functools.partial(torch.optim.SGD, groups, lr=0.1, momentum=0.9)`, called by every rank
        for its shard of the parameters. Groups are what torch's optimizers take; without them, all
        parameters form one.
        """
        return None

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return a scheduler of torch for the optimizer, or None for that of --optim.schedule.

        It steps after every training step; a ReduceLROnPlateau after every evaluation, with the
        loss. Checkpoints hold its state.
        """
        return None

    def on_step(self, record: StepRecord) -> str | None:
        """Look at the record of a step; a text that is returned ends the run with it.

        Called on every rank after each step. If one rank returns a text, all ranks stop together,
        after the next step. An exception ends the job. The base class does nothing in the three
        callbacks.
        """
        return None

    def on_evaluation(self, record: StepRecord) -> str | None:
        """Look at the record of a step with its evaluation, as `on_step`."""
        return None

    def on_checkpoint(self, path: Path) -> None:
        """Use the folder of a checkpoint that is complete on the disk. Called on rank 0 alone."""
        return

    def compared_files(self) -> Mapping[str, Path]:
        """Return files of the data, by a name that is the same on all nodes.

        At the start, ranks compare the files' sizes, besides the lengths of the datasets and a few
        samples. The default is no file.
        """
        return {}

    def compared_values(self) -> Mapping[str, str]:
        """Return facts by name that the ranks, and the jobs of a run, must have in common.

        Such as the tokenizer. A resumed run in which one differs is refused. The default is none.
        """
        return {}

    def run_files(self) -> Mapping[str, bytes]:
        """Return files to write into the run directory, by path within it. The default is none."""
        return {}

    def describe_data(self) -> str | None:
        """Return lines about the data to print at the start, or None for the numbers of samples."""
        return None

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return the FLOPs of one item that the loss counts, forward and backward, or None.

        A multiplication and an addition are two operations; recomputation is not counted. The job
        reports the utilisation of its GPUs from it.
        """
        return None

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the submodules that --train.compile compiles, each separately.

        All gradients of a compiled region become ready when its backward ends; with a single
        region, communication would not overlap backward. By default the modules of each outermost
        ModuleList, or the whole model without one.
        """
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        regions = {item: None for modules in lists for item in modules if item not in lists}
        nested = {inner for item in regions for inner in item.modules() if inner is not item}
        return [item for item in regions if item not in nested] or [model]

    def sample(self, model: nn.Module, prompt: str = "") -> str | None:
        """Return a text to print when training has ended, or None. Called on one rank only."""
        return None


# A task, its class, or its name as in --task.
Given: TypeAlias = Task | type[Task] | str


def load(given: Given, config: Config) -> Task:
    """Return the task of a job: a new one of a class, or of a name, or the one that is given.

    A name is "lm", "hf", or "package.module:Class" for one of your own. A task that is given gets
    the configuration. Raises ValueError for a name that is not of a task (see `import_class`), and
    for other objects. Exceptions of the task's constructor are not caught.
    """
    if isinstance(given, Task):
        given.config = config
        return given
    name = config.task
    found: Any = given
    if isinstance(given, str):
        names = _SHORT_NAMES
        if config.hf.head == "classification":
            names = {**names, "hf": _CLASSIFIER}
        found = import_class("--task", names.get(given, given))
    elif not inspect.isclass(given):
        raise ValueError(f"the task is of type {name}: give a Task, its class, or its name")
    if not issubclass(found, Task):
        raise ValueError(f"--task {name}: {found.__name__} does not derive from mntrain.tasks.Task")
    if missing := sorted(found.__abstractmethods__):
        raise ValueError(f"--task {name}: {found.__name__} lacks {', '.join(missing)}")
    task: Task = found(config)
    return task


def import_class(option: str, name: str) -> type[Any]:
    """Return the class "package.module:Class", which a user names by an option.

    The current directory is added to sys.path, as `python -m` does, and stays there: data-loader
    workers import the class again. Raises ValueError, which names the option, for a name that is
    malformed or of no class, and for a module that does not import.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name or module_name.startswith("."):
        others = f", and none of {', '.join(_SHORT_NAMES)}" if option == "--task" else ""
        raise ValueError(f'{option} {name}: is not of the form "package.module:Class"{others}')
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{option} {name}: module {module_name!r} does not import: "
            f"{type(error).__name__}: {error} (searched from {folder})"
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise ValueError(f"{option} {name}: module {module_name!r} has no class {class_name!r}")
    return found


def name_of(task: Task) -> str:
    """Return what --task says; of a task that keeps no configuration, the name of its class."""
    given: str | None = getattr(getattr(task, "config", None), "task", None)
    return given or class_name(type(task))


def class_name(kind: type) -> str:
    """Return the name of a class as --task takes it."""
    return f"{kind.__module__}:{kind.__qualname__}"


@contextmanager
def errors_of_task(task: Task, work: str) -> Iterator[None]:
    """Raise ValueError for an exception of the block: one line, with the line that raised it.

    That is the last one of the task, if any; of a check of mntrain's, there is none.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        try:
            own = inspect.getsourcefile(type(task))
        except (OSError, TypeError):  # of a class of `python -c`, or of a notebook
            own = None
        frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        file, text = Path(frame.filename), str(error).partition("\n")[0]
        ours = frame.filename != own and file.is_relative_to(Path(__file__).parents[1])
        where = "" if ours else f" ({file.name}, line {frame.lineno})"  # of what it has returned
        raise ValueError(
            f"--task {name_of(task)}: {work}: {type(error).__name__}: {text}{where}"
        ) from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model evaluate in the block, without gradients. Modules are then as they were."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def check_loss(loss: object, task: str) -> None:
    """Raise TypeError with what to return, unless a task's `loss` has returned it. Local."""
    if fault := next(_faults(loss), None):
        raise TypeError(f"loss() of --task {task}: {fault}")


def _faults(loss: object) -> Iterator[str]:
    """Yield what is wrong about a loss, the first fault first."""
    if not isinstance(loss, Loss):
        yield f"returned a {type(loss).__name__}: return mntrain.tasks.Loss(mean, count, metrics)"
        return
    if "loss" in loss.metrics:
        yield "a metric is named loss: give another name"
    values: dict[str, object] = {"mean": loss.mean, **loss.metrics}
    counts: dict[str, object] = {"count": loss.count}
    for name, value in values.items():
        if isinstance(value, Mean):
            counts[f"the count of {name}"] = value.count
        number = torch.as_tensor(value.value) if isinstance(value, Mean | Sum | Max) else value
        if not isinstance(number, Tensor) or number.dim():
            given = f"of shape {tuple(number.shape)}" if isinstance(number, Tensor) else number
            yield f"{name} is {given}, and must be a tensor of no dimension"
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 0:
            yield f"{name} is {count!r}, and must be the number of items of the mean, an int"
