"""The optimizer of a job, its parameter groups, and its learning-rate schedule."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from mntrain.optim import Muon, muon_groups
from mntrain.options.config import OptimConfig
from mntrain.tasks import Task, errors_of_task, import_class

Groups: TypeAlias = Sequence[Mapping[str, Any]]  # of parameters, with their options

# Optimizers whose fused GPU kernel is used. The fused CPU kernels round an element by its position
# in the tensor, so results would depend on how shards are cut.
FUSED = {"Adam", "AdamW", "SGD"}


def choose_optimizer(
    task: Task, model: nn.Module, config: OptimConfig, device: torch.device
) -> tuple[str, partial[Optimizer]]:
    """Return the optimizer that the task brings, or else the one of --optim, and its name. Local.

    It is partial(class, parameter groups, **options). Raises ValueError for one that cannot be
    used, and for an error of the task.
    """
    with errors_of_task(task, "optimizer() fails"):
        given: object = task.optimizer(model)
    if given is None:
        kind, options = resolve_optimizer(config, device)
        if kind is Muon:
            options["weight_decay"] = config.weight_decay
            groups = muon_groups(model, task.regions(model))
        else:
            groups = weight_decay_groups(model, config.weight_decay)
        return kind.__name__, partial(kind, groups, **options)
    if not isinstance(given, partial) or len(given.args) > 1:
        raise ValueError(
            f"optimizer() of the task returned a {type(given).__name__}: return functools.partial("
            "optimizer class, parameter groups, **options), or None for the one of --optim"
        )
    brought = given.args[0] if given.args else model.parameters()
    name = getattr(given.func, "__name__", str(given.func))
    return f"{name} of the task", partial(given.func, list(brought), **given.keywords)


def resolve_optimizer(
    config: OptimConfig, device: torch.device
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the optimizer class that is configured, and the options to construct it with.

    On a GPU the options ask for the fused kernel where the class has one. Raises ValueError for a
    name that is not of an optimizer, and for options that have a flag of their own.
    """
    kind = _find_class(config.name)
    name, parameters = kind.__name__, inspect.signature(kind).parameters
    if config.weight_decay and "weight_decay" not in parameters:
        raise ValueError(
            f"--optim.weight-decay {config.weight_decay}: {name} takes no weight decay; "
            "give --optim.weight-decay 0"
        )
    # TOML has no tuples, which optimizers document, and its names may have dashes.
    given = {
        key.replace("-", "_"): tuple(v) if isinstance(v, list) else v
        for key, v in config.options.items()
    }
    for key in ("lr", "weight_decay"):
        if key in given:
            flag = f"--optim.{key.replace('_', '-')}"
            raise ValueError(f"--optim.options: {key} is given by {flag}")
    options: dict[str, Any] = {"lr": config.lr}
    if name in FUSED and "fused" in parameters:
        options["fused"] = True if device.type == "cuda" else None  # None: torch's default
    return kind, options | given


def _find_class(name: str) -> type[Optimizer]:
    found = {"Muon": Muon}.get(name)  # torch's takes matrices only, and models have vectors too
    if ":" in name:
        found = import_class("--optim.name", name)
    elif found is None:
        found = getattr(torch.optim, name, None)
    if not inspect.isclass(found) or not issubclass(found, Optimizer) or found is Optimizer:
        known = [one for one, kind in vars(torch.optim).items() if inspect.isclass(kind)]
        raise ValueError(
            f"--optim.name {name}: is no torch.optim.Optimizer; torch.optim has "
            f'{", ".join(sorted(set(known) - {"Optimizer"}))}; or give "package.module:Class"'
        )
    return found


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of a model: matrices with weight decay, vectors without.

    Only parameters that require a gradient, and no empty group. The groups do not depend on the
    weight decay, which a resumed job may change.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def scheduler_of(task: Task, optimizer: Optimizer) -> LRScheduler | None:
    """Return the task's own scheduler of the learning rate, whose state checkpoints hold, if any.

    Raises ValueError if what the task brings is none, and for an error of the task.
    """
    with errors_of_task(task, "schedule() fails"):
        own: object = task.schedule(optimizer)
    if own is not None and not isinstance(own, LRScheduler):
        raise ValueError(
            f"schedule() of the task returned a {type(own).__name__}: return a scheduler of "
            "torch.optim.lr_scheduler, or None for that of --optim.schedule"
        )
    return own


def moved_options(scheduler: object, groups: Groups, before: Groups) -> set[str]:
    """Return the options of parameter groups that a scheduler sets. Local.

    `before` are copies of the groups from before it was made: a scheduler takes its first step
    then. Those of torch that cycle the momentum may begin with the value that is there.
    """
    pairs = [*zip(groups, before, strict=True)]
    moved = {key for group, was in pairs for key in group if group[key] is not was.get(key)}
    cycled = {"momentum", "betas"} if _cycles_momentum(scheduler) else set()
    return moved | {"lr", "initial_lr"} | cycled


def _cycles_momentum(scheduler: object) -> bool:
    own: bool = getattr(scheduler, "cycle_momentum", False)
    return own or any(map(_cycles_momentum, getattr(scheduler, "_schedulers", ())))


def options_scheduler(optimizer: Optimizer, config: OptimConfig, steps: int, done: int) -> LambdaLR:
    """Return the scheduler of --optim.schedule for a run of `steps` steps, behind `done` of them.

    It is a function of the number of steps: a resumed run may change it.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, lr_factor(config, steps), last_epoch=done - 1)


def advance(scheduler: LRScheduler, loss: float | None = None) -> None:
    """Step a scheduler after a training step, or one of plateaus with the loss of an evaluation."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        if loss is None:
            scheduler.step()
    elif loss is not None:
        scheduler.step(loss)


def lr_factor(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor as a function of the number of completed steps.

    Linear up to 1 over the warm-up; then, until the last of `steps` steps, by --optim.schedule:
    constant; linear down to `min_lr_fraction`; half a cosine down to it (Loshchilov and Hutter,
    "SGDR", 2017, arXiv 1608.03983, without restarts); or warm-up, stable, decay ("wsd"; Hu et al.,
    "MiniCPM", 2024, arXiv 2404.06395), whose decay is linear here (Haegele et al., 2024, arXiv
    2405.18392) and takes `decay_fraction` of the steps.
    """
    warmup, least = config.warmup_steps, config.min_lr_fraction
    first = warmup
    if config.schedule == "wsd":
        first = max(warmup, steps - 1 - round(config.decay_fraction * steps))

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        progress = min(1.0, max(0, done - first) / max(1, steps - 1 - first))
        if config.schedule == "cosine":
            return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
        return least + (1 - least) * (1 - progress)

    return factor
