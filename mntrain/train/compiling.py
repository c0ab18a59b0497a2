"""torch.compile, so that gradients still leave while backward runs.

The gradients of what is compiled together all come when its backward ends. Of a model that is
compiled whole, nothing would be sent before the end; so its regions are compiled one by one, in
place: names of parameters stay.

    layer 1 | layer 2 | layer 3 | head         each a graph, with a backward of its own
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn


def check(device: torch.device) -> None:
    """Raise ValueError where torch.compile lacks what it makes code with: early, and by name."""
    if device.type == "cpu":
        needed, language = os.environ.get("CXX", "g++"), "C++"
    else:
        needed, language = os.environ.get("CC", "gcc"), "C"
        if find_spec("triton") is None:
            raise ValueError(
                "--train.compile: on a GPU torch.compile needs triton: pip install triton, or "
                "leave the option out"
            )
        if needed == "gcc" and shutil.which(needed) is None:
            needed = "clang"  # which triton takes then
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise ValueError(
                "--train.compile: on a GPU torch.compile needs the headers of Python, which triton "
                "compiles with, and there is no Python.h: install python3-dev, or leave the option "
                "out"
            )
    if shutil.which(needed) is None:
        raise ValueError(
            f"--train.compile: on {'the CPU' if device.type == 'cpu' else 'a GPU'} torch.compile "
            f"needs a {language} compiler, and there is no {needed}: install one, name it in "
            f"{'CXX' if device.type == 'cpu' else 'CC'}, or leave the option out"
        )


def compile_regions(regions: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Have each of these modules compile its forward when it is first called. In place."""
    for region in regions:
        if region.forward.__module__.startswith("torch."):
            # torch.compile passes over what is torch's own unless something else calls it; so
            # Module.compile would do nothing, as of torch 2.13.
            region._compiled_call_impl = torch.compile(_calling(region), backend=backend)
        else:
            region.compile(backend=backend)


def _calling(region: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return region._call_impl(*args, **kwargs)

    return call


@contextmanager
def as_written() -> Iterator[None]:
    """Run regions without compiling them, for shapes that come once. From torch 2.6 on."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None:
        yield
        return
    with stance("force_eager"):
        yield
