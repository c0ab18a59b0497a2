"""torch.compile by regions, so that gradients are still sent while backward runs.

All gradients of a compiled graph arrive when its backward ends. A model that is compiled as a whole
would send nothing before that; so its regions are compiled one by one, in place, and parameters
keep their names.

    layer 1 | layer 2 | layer 3 | head         each is a graph with a backward of its own
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn


def check(device: torch.device) -> None:
    """Raise ValueError if a tool is missing that torch.compile generates code with. Local."""
    if device.type == "cpu":
        where, language, variable, compiler = "the CPU", "C++", "CXX", "g++"
    else:
        where, language, variable, compiler = "a GPU", "C", "CC", "gcc"
    needs = f"--train.compile: on {where} torch.compile needs"
    compiler = os.environ.get(variable, compiler)
    if device.type != "cpu":
        if find_spec("triton") is None:
            raise ValueError(f"{needs} triton: pip install triton, or leave the option out")
        if compiler == "gcc" and shutil.which(compiler) is None:
            compiler = "clang"  # triton's second choice
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise ValueError(
                f"{needs} the headers of Python, which triton compiles with, and there is no "
                "Python.h: install python3-dev, or leave the option out"
            )
    if shutil.which(compiler) is None:
        raise ValueError(
            f"{needs} a {language} compiler, and there is no {compiler}: install one, name it in "
            f"{variable}, or leave the option out"
        )


def compile_regions(regions: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Make each module compile its forward when it is first called. In place."""
    for region in regions:
        if region.forward.__module__.startswith("torch."):
            # torch.compile skips the forward of torch's own modules unless another function calls
            # it, so Module.compile would have no effect (as of torch 2.13).
            region._compiled_call_impl = torch.compile(_caller(region), backend=backend)
        else:
            region.compile(backend=backend)


def _caller(region: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return region._call_impl(*args, **kwargs)

    return call


def eager() -> AbstractContextManager[Any]:
    """Return a context in which regions run uncompiled, for shapes that occur once.

    Before torch 2.6 it has no effect.
    """
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else nullcontext()
