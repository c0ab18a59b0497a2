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

Importing this package starts nothing, and its names bring in torch only once they are asked for;
`init` starts MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mntrain._version import __version__

__all__ = ["AgreedError", "Loss", "Task", "World", "__version__", "init"]

if TYPE_CHECKING:
    from mntrain.errors import AgreedError
    from mntrain.tasks.base import Loss, Task
    from mntrain.world import World, init
else:  # hidden from type checkers, which would take any name as one that it may give
    _MODULES = {
        "AgreedError": "mntrain.errors",
        "Loss": "mntrain.tasks.base",
        "Task": "mntrain.tasks.base",
        "World": "mntrain.world",
        "init": "mntrain.world",
    }

    def __getattr__(name: str) -> object:
        """Import a name when it is first asked for: --help then does without torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_MODULES[name]), name)
        return found


def __dir__() -> list[str]:
    """All names, those not yet imported too."""
    return sorted({*globals(), *__all__})
