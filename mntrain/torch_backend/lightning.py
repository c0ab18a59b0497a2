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
from mntrain.errors import start_mpi

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

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError if `devices` and `num_nodes` do not fit MPI's ranks. Collective."""
        size, comm = self.world_size(), start_mpi()[0]
        found = comm.gather([int(os.environ[n]) for n in ("LOCAL_WORLD_SIZE", "GROUP_RANK")])
        comm.free()
        largest, nodes = max(local for local, _ in found), len({node for _, node in found})
        fits = num_devices * num_nodes == size and num_devices >= largest
        if not fits or (largest * nodes == size and num_nodes != nodes):
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} for {size} ranks of MPI, up to "
                f"{largest} of them on each of {nodes} nodes: give devices={largest} and "
                f"num_nodes={nodes}"
            )
