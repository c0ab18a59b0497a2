"""Train a PyTorch model across nodes with mpirun: gradients by hierarchical all-reduce over MPI.

    import mntrain, torch

    with mntrain.init() as world:
        model = Net().to(world.device)
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=3e-4, max_grad_norm=1.0)
        for batch in world.shard(loader):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

Importing the package has no effect: torch is imported on the first use of a name, and `init` starts
MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mntrain._version import __version__

__all__ = ["AgreedError", "Loss", "Task", "World", "__version__", "init"]

if TYPE_CHECKING:
    from mntrain.errors import AgreedError
    from mntrain.tasks import Loss, Task
    from mntrain.world import World, init
else:  # hidden from type checkers, for which any name would exist
    _MODULES = {
        "AgreedError": "mntrain.errors",
        "Loss": "mntrain.tasks",
        "Task": "mntrain.tasks",
        "World": "mntrain.world",
        "init": "mntrain.world",
    }

    def __getattr__(name: str) -> object:
        """Import a name on first use, so that --help needs no torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    """Return all names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
