"""The start of scripts for ranks of torch.distributed, and an object in the place of a world."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import zero
from zero.param_groups import as_groups


class TorchWorld:
    """Those parts of a world that the oracle of tests/mpi needs, over a process group."""

    def __init__(self, group=None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value):
        gathered = [None] * self.size
        dist.all_gather_object(gathered, value, self.group)
        return gathered

    def optimizer(self, model, kind, *, groups=None, bucket_mb=1e-3, **options):
        options = {"bucket_bytes": int(bucket_mb * (1 << 20)), **options}
        if groups is None:
            return zero.ZeroOptimizer(model, kind, zero.TorchCollectives(self.group), **options)
        named = as_groups(groups, model)
        collectives = zero.TorchCollectives(self.group)
        return zero.ZeroOptimizer(named, kind, collectives, model=model, **options)


def run_tests(names, timeout_s=60):
    """Call each test of a script with a `TorchWorld`; on ranks of mpirun, over our backend."""
    torch.set_num_threads(1)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if not under_torchrun:
        import mntrain.torch_backend  # noqa: F401 - registers the backend
    backend = "gloo" if under_torchrun else "mntrain"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    world = TorchWorld()
    tests = [value for name, value in names.items() if name.startswith("test_")]
    for test in tests:
        print(f"rank {world.rank}: {test.__name__}\n", end="", flush=True)
        test(world)
    if under_torchrun:
        assert "mpi4py" not in sys.modules
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {world.rank}: {len(tests)} tests passed\n", end="", flush=True)
