"""Which torch optimizer, on which parameters, at which learning rate."""

import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mntrain.config import OptimConfig

# Of torch.optim, what a training step cannot drive, and why.
UNFIT = {
    "LBFGS": "it runs the forward by itself",
    "Muon": "it takes matrices only, and models have vectors too",
    "SparseAdam": "gradients here are dense",
}
# What has a kernel that makes the whole update on a GPU in one pass. Those for the CPU round an
# element by where it lies in its tensor, so that stages would differ.
FUSED = {"Adam", "AdamW", "SGD"}


def find(config: OptimConfig, device: torch.device) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class of torch.optim that a name stands for, and the options to make it with.

    On a GPU it makes its update by one kernel (`fused`), if it has one.

    Raises ValueError for a name that torch does not have, and for options that the class does not
    take.
    """
    known = [
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    ]
    if config.name in UNFIT:
        raise ValueError(f"--optim.name {config.name}: {UNFIT[config.name]}; choose another")
    if config.name not in known:
        by_lower = {name.lower(): name for name in known}
        close = get_close_matches(config.name.lower(), by_lower, cutoff=0.5)
        near = [by_lower[name] for name in close] or sorted(known)
        raise ValueError(
            f"--optim.name {config.name}: torch.optim has no such optimizer; "
            f"nearest: {', '.join(near)}"
        )
    kind: type[Optimizer] = getattr(torch.optim, config.name)
    takes = inspect.signature(kind).parameters
    if config.weight_decay and "weight_decay" not in takes:
        raise ValueError(
            f"--optim.weight-decay {config.weight_decay}: {config.name} takes no weight decay; "
            "give --optim.weight-decay 0"
        )
    options: dict[str, Any] = {"lr": config.lr}
    if config.name in FUSED and "fused" in takes:
        options["fused"] = True if device.type == "cuda" else None  # None: as torch thinks fit
    return kind, options


def decayed_and_not(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of a model: matrices, which decay, and vectors (gains, biases), which don't.

    Only groups that hold something that requires a gradient; without weight decay, one group.
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
    """The factor on the learning rate for the step that follows `done` steps.

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
