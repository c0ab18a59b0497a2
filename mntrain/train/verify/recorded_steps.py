"""Gradients and weights of the steps of a run, beside those of another run of the same steps.

A hook before each `ZeroOptimizer.step` takes the whole gradients, and one after it the weights. The
first run keeps them; of others only their distances from it remain. A hook of modules takes digests
of their inputs, which tell whether ranks have trained on the same samples.
"""

import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, IterableDataset

from mntrain.data.source import is_of_torch, rebuilt
from mntrain.errors import RemoteRankError
from mntrain.world import World
from zero.kernels import checksum
from zero.optimizer import ZeroOptimizer
from zero.sync_batchnorm import SyncBatchNorm

# Runs the steps in a world, at a stage, and in the order of the world.
Run: TypeAlias = Callable[["RecordedWorld", int], Iterable[float] | None]

_CALLS = 64  # of modules in a step, whose inputs tell whether ranks see the same samples


class Distance(NamedTuple):
    """The distance of a tensor from that of the first run."""

    relative: float  # norm of the difference / norm of the gradient, or of the updates so far
    rounding: float  # what one rounding of each element makes of it


@dataclass
class RecordedStep:
    """One call of `step` of an optimizer."""

    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the first run
    weights: dict[str, Tensor] = field(default_factory=dict)
    distances: dict[str, Distance] = field(default_factory=dict)  # of others, in order
    factor: float = 1.0  # by which the whole gradient is longer, if it has the same direction
    digests: dict[str, int] = field(default_factory=dict)  # of weights and buffers
    inputs: list[int] = field(default_factory=list)  # digests of what modules were called with
    closure: bool = False  # which makes the gradients in the step, so that they are not recorded


class RecordedRun:
    """The steps of a run that is recorded, beside those of the `first` run if this rank has it.

    With `keeps`, it is such a first run itself, whose tensors are kept. `jitter` changes
    each element of a gradient by at most so many times its size, or the usual size of the
    gradient's elements (root mean square of those that are not 0), in one process alone.
    """

    def __init__(
        self, first: "RecordedRun | None" = None, *, keeps: bool = False, jitter: float = 0.0
    ) -> None:
        self.first, self._keeps, self._jitter = first, keeps, jitter
        self.steps: list[RecordedStep] = []
        self.start: dict[str, Tensor] = {}  # the weights before the first step
        self.losses: list[float] = []
        self.dropout = 0  # layers, which do nothing meanwhile
        self.stages: set[int] = set()  # of the optimizers
        self.batch_norms: set[str] = set()  # layers that normalize this rank's samples alone
        self.samples = 0  # that `world.shard` has handed out here
        self.left_out: list[str] = []  # what the run says that it does not compare
        self.autocast = 0.0  # one rounding of the dtype that modules compute in, if it is another
        self._draws = torch.Generator().manual_seed(1)
        self._step = RecordedStep()
        self._optimizers: list[ZeroOptimizer] = []

    def record(self, run: Run, world: "RecordedWorld", stage: int) -> None:
        """Run the steps in a world, from the same seeds each time. Collective in it."""
        world.recorded, before = self, world._shards.samples
        random.seed(0)
        torch.manual_seed(0)
        np.random.seed(0)
        world._shards.begin_anew()
        with self._hooks():
            self.losses = [float(loss) for loss in run(world, stage) or ()]
        self.samples = world._shards.samples - before
        if self.first is None or not self.steps:
            return
        rounding = max(2.0**-23, self.first.rounding)  # of micro-batches that are divided otherwise
        for number, (loss, other) in enumerate(zip(self.losses, self.first.losses, strict=False)):
            step = self.steps[number * len(self.steps) // len(self.losses)]
            relative = abs(loss - other) / max(abs(other), 1e-300)
            worst = step.distances.pop("loss", Distance(0.0, 0.0))
            worst = worst if worst.relative > relative else Distance(relative, rounding)
            step.distances = {"loss": worst, **step.distances}

    def watch(self, optimizer: ZeroOptimizer) -> None:
        """Record the steps of an optimizer that was made. Local."""
        self._optimizers.append(optimizer)
        self.stages.add(optimizer.stage)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Enclose the run."""
        seen, given = set[nn.Module](), dict[nn.Module, float]()

        def before_call(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if module not in seen:
                for path, layer in module.named_modules():
                    if layer in seen:
                        continue
                    seen.add(layer)
                    if (name := _dropout(layer)) and getattr(layer, name):
                        given[layer] = getattr(layer, name)
                        setattr(layer, name, 0.0)
                    alone = isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
                    if alone and layer.training:
                        self.batch_norms.add(path or type(layer).__name__)
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    eps = torch.finfo(torch.get_autocast_dtype(device)).eps
                    self.autocast = max(self.autocast, eps)
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            if tensors and len(self._step.inputs) < _CALLS and module.training:
                self._step.inputs.append(int(checksum(tensors)))

        with ExitStack() as hooks:
            for handle in (
                register_module_forward_pre_hook(before_call),
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ):
                hooks.callback(handle.remove)
            yield
        self.dropout = len(given)
        for layer, probability in given.items():
            setattr(layer, _dropout(layer), probability)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not isinstance(optimizer, ZeroOptimizer) or optimizer not in self._optimizers:
            return
        named = self._names(optimizer)
        if self._keeps or self.first:
            self.start |= {n: _copy(p) for n, p in named.items() if n not in self.start}
        self._step.closure = any(given is not None for given in (*args[1:], *kwargs.values()))
        if self._step.closure:
            return
        if self._jitter:
            for parameter in named.values():
                if parameter.grad is not None:
                    self._round(parameter.grad)
        gradients = {name: optimizer.full_gradient(p) for name, p in named.items()}
        if self._keeps:
            self._step.gradients = {n: None if g is None else g.cpu() for n, g in gradients.items()}
            return
        if (expected := self._expected()) is not None:
            self._compare_gradients(gradients, expected)

    def _round(self, gradient: Tensor) -> None:
        """Change a gradient in place, as if partial sums of the usual size had been rounded."""
        draw = torch.rand(gradient.shape, generator=self._draws) * 2 - 1
        used = gradient != 0
        usual = gradient.double().norm() / used.sum().clamp(min=1).sqrt()
        partial = torch.maximum(gradient.abs(), usual.to(gradient.dtype)) * used
        gradient += self._jitter * draw.to(gradient.device) * partial

    def _compare_gradients(
        self, gradients: dict[str, Tensor | None], expected: RecordedStep
    ) -> None:
        """Note the distances of gradients, and of all as one vector."""
        total = products = squares = 0.0
        pairs = {
            name: (_wide(gradient, self.start[name]), _wide(other, self.start[name]))
            for name, gradient in gradients.items()
            for other in [expected.gradients.get(name)]
            if gradient is not None or other is not None
        }
        whole = math.hypot(*(float(there.norm()) for _, there in pairs.values()))
        coarsest = max((torch.finfo(self.start[name].dtype).eps for name in pairs), default=0.0)
        for name, (here, there) in pairs.items():
            difference = float((here - there).norm())
            eps = torch.finfo(self.start[name].dtype).eps
            # Less than the rounding of the whole gradient is nothing.
            norm = max(float(there.norm()), eps * whole, 1e-300)
            self._step.distances[f"gradient of {name}"] = Distance(difference / norm, eps)
            total, products = math.hypot(total, difference), products + float(here.dot(there))
            squares += float(here.dot(here))
        self._step.distances["whole gradient"] = Distance(total / max(whole, 1e-300), coarsest)
        if products > 0 and products**2 > 0.999 * squares * whole**2:
            self._step.factor = math.sqrt(squares) / whole

    def _compare_weights(
        self, named: dict[str, nn.Parameter], expected: RecordedStep, begun: dict[str, Tensor]
    ) -> None:
        """Note the distances of weights."""
        for name, parameter in named.items():
            there, start = expected.weights[name].double(), begun[name].double()
            difference = float((parameter.detach().cpu().double() - there).norm())
            update = max(float((there - start).norm()), 1e-300)
            rounding = torch.finfo(parameter.dtype).eps * float(there.norm()) / update
            self._step.distances[f"weights of {name}"] = Distance(difference / update, rounding)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not isinstance(optimizer, ZeroOptimizer) or optimizer not in self._optimizers:
            return
        optimizer.wait_for_parameters()
        named, expected = self._names(optimizer), self._expected()
        if self._keeps:
            self._step.weights = {name: _copy(p) for name, p in named.items()}
        elif expected is not None and self.first is not None:
            self._compare_weights(named, expected, self.first.start)
        model = optimizer._model
        buffers = dict(model.named_buffers()) if model is not None else {}
        self._step.digests = {n: int(checksum([t])) for n, t in {**named, **buffers}.items()}
        self.steps.append(self._step)
        self._step = RecordedStep()

    @property
    def rounding(self) -> float:
        """One rounding of a parameter's dtype, or of that which modules compute in, at most."""
        return max([self.autocast, *(torch.finfo(p.dtype).eps for p in self.start.values())])

    @property
    def closures(self) -> bool:
        """True if gradients of a step were made by a closure, and are not recorded."""
        return any(step.closure for step in self.steps)

    @property
    def with_gradient(self) -> set[str]:
        """The parameters that have had a gradient, of which not all is zero, in a first run."""
        recorded = (item for step in self.steps for item in step.gradients.items())
        return {name for name, gradient in recorded if gradient is not None and gradient.any()}

    @property
    def updated(self) -> set[str]:
        """The parameters that were not the same after all steps of a first run."""
        recorded = (item for step in self.steps for item in step.weights.items())
        return {name for name, weight in recorded if not torch.equal(weight, self.start[name])}

    def _expected(self) -> RecordedStep | None:
        """Return the same step of the first run, if this rank has it and it took so many."""
        steps = self.first.steps if self.first else []
        return steps[len(self.steps)] if len(steps) > len(self.steps) else None

    def _names(self, optimizer: ZeroOptimizer) -> dict[str, nn.Parameter]:
        number = self._optimizers.index(optimizer)
        prefix = f"optimizer {number + 1}: " if number else ""
        return {prefix + name: parameter for name, parameter in optimizer._named.items()}


def _dropout(layer: nn.Module) -> str:
    """Return the name of a layer's probability of dropout; "" if it has none."""
    if isinstance(layer, _DropoutNd):
        return "p"
    return "dropout" if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) else ""


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", copy=True)


def _wide(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient as a flat fp64 tensor on the CPU; zeros if there is none."""
    found = torch.zeros_like(like) if gradient is None else gradient
    return found.cpu().double().reshape(-1)


class RecordedWorld(World):
    """A world that a loop is verified in.

    The second batch of a DataLoader is as short as the last one of its epoch, which few steps do
    not reach. With an `order` other than 0, the samples of each batch are in another order.
    """

    recorded: RecordedRun
    order = 0

    def optimizer(self, *args: Any, **options: Any) -> ZeroOptimizer:
        """Return a distributed optimizer, as `World.optimizer`, whose steps are recorded."""
        made = super().optimizer(*args, **options)
        self.recorded.watch(made)
        return made

    def shard(self, loader: Iterable[Any], *args: Any, **options: Any) -> Any:
        """Return the shard of a loader, as `World.shard`."""
        if (
            not is_of_torch(loader)
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_sampler is None
        ):
            return super().shard(loader, *args, **options)
        changed = self.__dict__.setdefault("_changed", {})
        key = id(loader), self.order
        if key not in changed:  # the same loader in each epoch
            batches = _Batches(loader.batch_sampler, self.order)
            changed[key] = loader, rebuilt(loader, batch_sampler=batches)
        return super().shard(changed[key][1], *args, **options)

    def leave(self, error: Exception, *, refused: bool) -> str | None:
        """Leave a loop that has failed on this rank, with all others. Local.

        Returns the error, or None for another rank's. Prints where it is raised if it refuses
        nothing.
        """
        if isinstance(self._engine.error or error, RemoteRankError):
            self.abandon()
            return None
        refused = refused and isinstance(error, ValueError | RuntimeError)
        if not refused:
            traceback.print_exception(error)
        self.watchdog.tell_failure(self._watch.describe(error))
        self.abandon()
        return str(error) if refused and str(error) else f"{type(error).__name__}: {error}"


class _Batches:
    """A batch sampler with the batches of another one, the second as short as its last."""

    def __init__(self, batches: Any, order: int) -> None:
        self._batches, self._order, self._draws = batches, order, random.Random(order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        last = _last_batch(self._batches)
        for number, given in enumerate(self._batches):
            batch = list(given)
            if number == 1 and last:
                batch = batch[:last]
            yield self._draws.sample(batch, len(batch)) if self._order else batch


def _last_batch(batches: Any) -> int:
    """Return the number of samples of a last batch that is shorter than others; 0 if not known."""
    if type(batches) is not BatchSampler or batches.drop_last:
        return 0
    try:
        return len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]
    except TypeError:  # of a sampler without an end
        return 0
