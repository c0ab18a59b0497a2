"""Backend "mntrain" of torch.distributed without an import: torch loads this module with itself.

Torch calls `register` when it is imported, by the entry point "torch.backends" of this package,
unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. MPI starts when a process group does.

Source: https://docs.pytorch.org/docs/stable/distributed.html#third-party-backends, and
https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlparse

_ADVICE = (
    "for backend mntrain, whose ranks are MPI's: start the script with mpirun or srun, or, for one "
    "rank without them, import mntrain.torch_backend before"
)

# ruff: noqa: PLC0415 - imports inside of functions: every import of torch would wait for them


def register() -> None:
    """Let torch.distributed find the backend. Local; starts nothing.

    Does nothing in a torch without what it needs: an error here would end every import of torch.
    """
    import torch.distributed as dist

    with suppress(ImportError):
        from torch.distributed.rendezvous import _rendezvous_handlers as handlers

        dist.Backend.register_backend(
            "mntrain", _create, extended_api=True, devices=["cpu", "cuda"]
        )
        handlers["env"] = partial(_meet, handlers["env"])


def _create(opts: Any, more: object) -> Any:
    from mntrain.torch_backend import create

    return create(opts, more)


def _meet(of_torch: Callable[..., Iterator[Any]], url: str, **more: Any) -> Iterator[Any]:
    """Meet as torch does, by arguments and variables; under MPI, set the variables first.

    The handler does not know the backend. Without a rank torch raises an error, for any.
    """
    from mntrain.checks import launcher

    started = launcher.first_number(os.environ, launcher.RANK_VARIABLES) is not None
    knows = "RANK" in os.environ or "rank" in dict(parse_qsl(urlparse(url).query))
    if knows or not started:
        try:
            yield from of_torch(url, **more)
        except ValueError as error:
            if not knows:
                error.add_note(_ADVICE)
            raise
        return
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    before = handlers["env"]
    import mntrain.torch_backend  # noqa: F401 - it sets them, but in a rank's child

    after = handlers["env"]
    yield from (of_torch if after is before else after)(url, **more)
