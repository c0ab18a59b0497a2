"""Classes and functions of torch above process groups, whose results are printed, to be compared.

mpirun -n 2 python frameworks.py mntrain
mpirun -n 2 python frameworks.py gloo
"""

import copy
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import mntrain
import mntrain.torch_backend

warnings.filterwarnings("ignore")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 24), nn.Linear(24, 1))


def step(model, optimizer):
    torch.manual_seed(5 + dist.get_rank())
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer_class=torch.optim.SGD, steps=4):
    optimizer = optimizer_class(model.parameters(), lr=0.02)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def digest(model):
    tensors = [getattr(it, "full_tensor", lambda it=it: it)() for it in model.parameters()]
    return sum(it.detach().double().abs().sum().item() for it in tensors)


def zero_redundancy():
    def make(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)

    return digest(train(DistributedDataParallel(make_model()), make)[0])


def compiled():
    model = torch.compile(DistributedDataParallel(make_model()), backend="eager")
    return digest(train(model)[0])


def uneven_inputs():
    model = DistributedDataParallel(make_model())
    with Join([model]):
        train(model, steps=3 + dist.get_rank())
    with model.join(divide_by_initial_world_size=False):
        train(model, steps=3 + dist.get_rank())
    return digest(model)


def fsdp_of_old():
    model, optimizer = train(FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")))
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return digest(model) + len(state["param_groups"])


def sharded_checkpoint_of_old():
    """Save and load parameters of which some ranks have no part; rank 0 gathers the parts."""
    kind, cpu = FullyShardedDataParallel, torch.device("cpu")
    model = kind(make_model(), device_id=cpu)
    train(model)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    with kind.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=folder[0])
        before = digest(model)
        train(model)
        dcp.load(state, checkpoint_id=folder[0])
        model.load_state_dict(state["model"])
    assert digest(model) == before
    total = 0.0
    for part in state["model"].values():
        whole = torch.empty(part.shape) if dist.get_rank() == 0 else None
        part.gather(0, whole)
        total += 0.0 if whole is None else whole.double().abs().sum().item()
    return total


def asynchronous_checkpoint():
    model = make_model()
    fully_shard(model)
    _, optimizer = train(model, torch.optim.AdamW)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    before = digest(model)
    dcp.async_save(states, checkpoint_id=folder[0]).result()
    step(model, optimizer)
    assert digest(model) != before
    dcp.load(states, checkpoint_id=folder[0])
    model_state, optimizer_state = states["model"], states["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert digest(model) == before
    step(model, optimizer)
    return digest(model)


def batch_norm_of_all_ranks():
    """Train DDP with the statistics of all ranks' samples, beside one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    batch, layers = torch.randn(5 * size, 8).double(), (nn.BatchNorm1d(8), nn.Linear(8, 1))
    alone = nn.Sequential(*layers).double()
    together = copy.deepcopy(alone)
    with mntrain.init() as world:
        world.sync_batchnorm(together)
        together = DistributedDataParallel(together)
        for model, samples in ((alone, batch), (together, batch[5 * rank : 5 * rank + 5])):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(samples).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(together.module.state_dict(), alone.state_dict())
    return digest(together)


def tensor_parallel():
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"2": ColwiseParallel(), "3": RowwiseParallel()})
    return digest(train(model)[0])


def pipeline():
    """Each rank has two stages, which send each other many messages of one tag."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [nn.Linear(8, 8) for _ in range(2 * size)]
    stages = [
        PipelineStage(layers[i], i, 2 * size, torch.device("cpu")) for i in (rank, rank + size)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4 * size, loss_fn=nn.functional.mse_loss)
    batch, targets = torch.randn(8 * size, 8), torch.randn(8 * size, 8)
    loss = nn.functional.mse_loss(nn.Sequential(*layers)(batch), targets)
    expected = torch.autograd.grad(loss, [layer.weight for layer in layers])
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(**({"target": targets} if rank == size - 1 else {}))
    for i in (rank, rank + size):
        torch.testing.assert_close(layers[i].weight.grad, expected[i])
    return loss.item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1])
    for function in (
        *(zero_redundancy, compiled, uneven_inputs, fsdp_of_old, sharded_checkpoint_of_old),
        *(asynchronous_checkpoint, batch_norm_of_all_ranks, tensor_parallel, pipeline),
    ):
        result = function()
        if dist.get_rank() == 0:
            print(f"{function.__name__} {result:.9}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
