"""The torch optimizer of a job: its class, its parameter groups and its learning rate."""

import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mntrain.config import OptimConfig

# Optimizers of torch.optim that a training step cannot drive, and the reason.
UNSUPPORTED = {
    "LBFGS": "it runs the forward by itself",
    "Muon": "it takes matrices only, and models have vectors too",
    "SparseAdam": "gradients here are dense",
}
# Optimizers whose fused GPU kernel is used. The fused CPU kernels round an element by its position
# in the tensor, so results would depend on how shards are cut.
FUSED = {"Adam", "AdamW", "SGD"}


def resolve_optimizer(
    config: OptimConfig, device: torch.device
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the torch.optim class that is configured, and the options to construct it with.

    On a GPU the options ask for the fused kernel where the class has one. Raises ValueError for a
    name that torch.optim lacks or that cannot be used here, and for weight decay that the class
    does not take.
    """
    known = [
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    ]
    if config.name in UNSUPPORTED:
        raise ValueError(f"--optim.name {config.name}: {UNSUPPORTED[config.name]}; choose another")
    if config.name not in known:
        by_lower = {name.lower(): name for name in known}
        close = get_close_matches(config.name.lower(), by_lower, cutoff=0.5)
        nearest = [by_lower[name] for name in close] or sorted(known)
        raise ValueError(
            f"--optim.name {config.name}: torch.optim has no such optimizer; "
            f"nearest: {', '.join(nearest)}"
        )
    kind: type[Optimizer] = getattr(torch.optim, config.name)
    parameters = inspect.signature(kind).parameters
    if config.weight_decay and "weight_decay" not in parameters:
        raise ValueError(
            f"--optim.weight-decay {config.weight_decay}: {config.name} takes no weight decay; "
            "give --optim.weight-decay 0"
        )
    options: dict[str, Any] = {"lr": config.lr}
    if config.name in FUSED and "fused" in parameters:
        options["fused"] = True if device.type == "cuda" else None  # None: torch's default
    return kind, options


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of a model: matrices with weight decay, vectors without.

    Only parameters that require a gradient, and no empty group; one group without weight decay.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": trained}]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def warmup_then_cosine(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor as a function of the number of completed steps.

    Linear up to 1 over the warm-up, then a half cosine down to `min_lr_fraction` at the last step.
    Source: Loshchilov and Hutter, "SGDR", 2017 (arXiv 1608.03983), without restarts.
    """
    warmup, least = config.warmup_steps, config.min_lr_fraction

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        progress = min(1.0, (done - warmup) / max(1, steps - 1 - warmup))
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    return factor
