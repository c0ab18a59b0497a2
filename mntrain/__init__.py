"""Train a PyTorch model across nodes with mpirun: gradients by hierarchical all-reduce over MPI.

`init` makes a `World`. Its `optimizer` reduces the gradients of a model, and its `shard` gives each
rank its part of the batches of a loader. examples/own_loop.py is a complete program.

Importing the package has no effect: torch is imported on the first use of a name, and `init` starts
MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mntrain._version import __version__

__all__ = [
    "AgreedError",
    "Loss",
    "RemoteRankError",
    "ShuffledBatches",
    "Task",
    "World",
    "__version__",
    "init",
    "sync",
    "train",
    "verify",
]

if TYPE_CHECKING:
    from mntrain import sync, train
    from mntrain.data.sampling import ShuffledBatches
    from mntrain.errors import AgreedError, RemoteRankError
    from mntrain.tasks import Loss, Task
    from mntrain.train.verify.verification import verify
    from mntrain.world import World, init
else:  # hidden from type checkers, for which any name would exist
    _MODULES = {
        "AgreedError": "mntrain.errors",
        "Loss": "mntrain.tasks",
        "RemoteRankError": "mntrain.errors",
        "ShuffledBatches": "mntrain.data.sampling",
        "Task": "mntrain.tasks",
        "World": "mntrain.world",
        "init": "mntrain.world",
        "verify": "mntrain.train.verify.verification",
    }

    def __getattr__(name: str) -> object:
        """Import a name on first use, so that --help needs no torch."""
        if name in ("sync", "train"):  # modules, which become attributes of this package
            return import_module(f"mntrain.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    """Return the public names, including those that are not imported yet."""
    return __all__
