"""The forward of a task: its dtypes, and the compilation and recomputation of regions."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mntrain import device
from mntrain.tasks import Loss, Task


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model and of its forward, and the scaling of its loss, by --train.precision."""

    parameters: torch.dtype | None = None  # and of buffers and gradients; None: the task's choice
    autocast: torch.dtype | None = None  # None: forward runs in the parameters' dtype
    loss_scale: Literal["dynamic"] | None = None

    def loss(self, task: Task, model: nn.Module, batch: Any, on: torch.device) -> Loss:
        """Return the task's loss of a micro-batch, which is moved to the model's device. Local."""
        moved = device.move(batch, on, self.parameters)
        with torch.autocast(on.type, dtype=self.autocast) if self.autocast else nullcontext():
            return task.loss(model, moved)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale="dynamic"),  # small gradients would underflow
}


def check_compiler(device: torch.device) -> None:
    """Raise ValueError if there is no compiler for torch.compile. Local."""
    cuda = device.type == "cuda"  # triton compiles its launchers
    language, variable, compilers = (
        ("C", "CC", ["gcc", "clang"]) if cuda else ("C++", "CXX", ["g++"])
    )
    named = os.environ.get(variable)
    if not any(map(shutil.which, [named] if named else compilers)):
        raise ValueError(
            f"--train.compile: torch.compile needs a {language} compiler, and there is no "
            f"{named or compilers[0]}: install one, name it in {variable}, or leave the option out"
        )


def compile_regions(regions: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Make each module compile its forward when it is first called. In place.

    All gradients of a compiled graph arrive when its backward ends. A model that is compiled as a
    whole would send nothing before that, so its regions are compiled one by one.
    """
    for region in regions:
        if region.forward.__module__.startswith("torch."):
            # torch.compile skips the forward of torch's own modules unless another function calls
            # it, so Module.compile would have no effect (as of torch 2.13).
            region._compiled_call_impl = torch.compile(_caller(region), backend=backend)
        else:
            region.compile(backend=backend)


def recompute_regions(regions: Sequence[nn.Module]) -> None:
    """Make each module keep only its input, and compute its activations again in backward.

    In place. Random numbers, such as those of dropout, are the same again. Source: Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174).
    """
    for region in regions:
        region.forward = partial(checkpoint, region.forward, use_reentrant=False)


def _caller(region: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return region._call_impl(*args, **kwargs)

    return call


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which regions run uncompiled, for shapes that occur once.

    Before torch 2.6 it has no effect.
    """
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else nullcontext()
