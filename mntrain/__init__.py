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

Importing this package starts nothing; `init` starts MPI.
"""

from mntrain._version import __version__
from mntrain.failures import AgreedError
from mntrain.world import World, init

__all__ = ["AgreedError", "World", "__version__", "init"]
