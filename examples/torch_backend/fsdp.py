"""A script for FSDP2 and torchrun, but for the two lines that name mntrain.

    mpirun -np 4 python examples/torch_backend/fsdp.py

Two replicas of a model, each in shards; then a distributed checkpoint is saved and loaded.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mntrain.torch_backend  # noqa: F401 - registers the backend


def main() -> None:
    """Train, save and load, and print the losses before and after."""
    dist.init_process_group("mntrain")
    replicas = 2 if dist.get_world_size() % 2 == 0 else 1
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 1))
    for layer in (*model, model):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(32, 16)
    targets = batch[:, :1].sin()

    def loss_of_all() -> torch.Tensor:
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        dist.all_reduce(total := loss.detach(), dist.ReduceOp.AVG)
        return total

    for _ in range(30):
        loss_of_all()
        optimizer.step()
        optimizer.zero_grad()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    before = loss_of_all()
    dcp.save(states, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(states, checkpoint_id=folder[0])
    model_state, optimizer_state = states["model"], states["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    after = loss_of_all()
    if dist.get_rank() == 0:
        print(f"loss {before:.6f}, and {after:.6f} from the checkpoint", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
