"""Lightning under mpirun, over backend "mntrain" of torch.distributed.

    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
    from mntrain.torch_backend.lightning import MpiEnvironment

    strategy = DDPStrategy(process_group_backend="mntrain")
    trainer = L.Trainer(devices=4, strategy=strategy, plugins=[MpiEnvironment()])

The import starts MPI, as that of `mntrain.torch_backend` does.
"""

import os

import mntrain.torch_backend  # noqa: F401 - it sets the variables that are read here
from mntrain.checks import launcher

try:
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs Lightning: pip install lightning") from error


class MpiEnvironment(TorchElasticEnvironment):
    """Lightning's cluster environment of ranks that mpirun or srun has started.

    Give it to `Trainer` or `Fabric` by `plugins=[MpiEnvironment()]`. Ranks, sizes and the address
    are those that `mntrain.torch_backend` has set in torchrun's variables. Without it, Lightning
    looks for other launchers first: mpirun in a job of Slurm then has rank 0 in all processes.
    """

    @staticmethod
    def detect() -> bool:
        """Return whether a launcher of MPI has started this process. Local."""
        return launcher.first_number(os.environ, launcher.RANK_VARIABLES) is not None
