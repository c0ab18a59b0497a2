"""A script for DDP and torchrun, but for the two lines that name mntrain.

    mpirun -np 4 python examples/torch_backend/ddp.py

Classifies scikit-learn's digits (the extra `examples`). Gradients travel in 16 bits, by a hook of
torch's.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mntrain.torch_backend  # noqa: F401 - registers the backend


def main() -> None:
    """Train, and print the accuracy on all samples."""
    dist.init_process_group("mntrain")
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    dataset = TensorDataset(images.float() / 16, labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.Adam(ddp.parameters(), 3e-3)
    sampler = DistributedSampler(dataset)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch, targets in DataLoader(dataset, batch_size=32, sampler=sampler):
            nn.functional.cross_entropy(ddp(batch), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    part = DistributedSampler(dataset, shuffle=False)
    batch, targets = dataset[list(part)]
    with torch.inference_mode():
        right = (model(batch).argmax(1) == targets).float().mean()
    dist.all_reduce(right, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
