"""DDP with hooks, FSDP2, HSDP and distributed checkpoints over backend mntrain, beside gloo's.

    mpirun -n 2 python training.py
    mpirun -n 2 python training.py cuda     (all ranks may share one GPU)

Training over gloo is on the CPU.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mntrain.torch_backend  # noqa: F401 - registers the backend

warnings.filterwarnings("ignore", message=".*(frozen|overlap).*")
STEPS = 4
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def make_model():
    torch.manual_seed(1)
    layers = [nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 301)]
    return nn.Sequential(*layers, nn.Linear(301, 1, bias=False))


def train(model):
    """The losses of some steps, on this rank's samples."""
    torch.manual_seed(100 + dist.get_rank())
    device = next(model.parameters()).device
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8).to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def replicated(group, hook=None):
    model = make_model().to(DEVICE if group == dist.group.WORLD else "cpu")
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.2)
    if hook is not None:
        model.register_comm_hook(group, hook)
    return model


def sharded(mesh):
    model = make_model().to(mesh.device_type)
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compare(what, ours, theirs, rtol=1e-5 if DEVICE == "cpu" else 1e-4):
    losses, expected = train(ours), train(theirs)
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)
    print(f"rank {dist.get_rank()} {what}: as over gloo", flush=True)


def check_checkpoint(model):
    """Save, change and load a sharded model."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state = get_model_state_dict(model)
    before = [value.full_tensor().clone() for value in model.parameters()]
    dcp.save(state, checkpoint_id=folder[0])
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    dcp.load(state, checkpoint_id=folder[0])
    after = [value.full_tensor() for value in model.parameters()]
    assert all(map(torch.equal, before, after))
    print(f"rank {dist.get_rank()} checkpoint: as saved", flush=True)


def check_repeats(make):
    first, second = train(make()), train(make())
    assert torch.equal(first, second)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("mntrain")
    gloo, size = dist.new_group(backend="gloo"), dist.get_world_size()
    world = dist.group.WORLD
    compare("DDP", replicated(world), replicated(gloo))
    check_repeats(lambda: replicated(world))
    hook = default_hooks.fp16_compress_hook
    compare("DDP, fp16 hook", replicated(world, hook), replicated(gloo, hook), rtol=1e-2)
    ours = sharded(init_device_mesh(DEVICE, (size,)))
    compare("FSDP2", ours, sharded(DeviceMesh.from_group(gloo, "cpu")))
    check_checkpoint(ours)
    if size % 2 == 0:
        names = ("replicas", "shards")
        mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=names)
        compare("HSDP", sharded(mesh), sharded(DeviceMesh.from_group(gloo, "cpu")), rtol=1e-4)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
