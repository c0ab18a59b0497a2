"""BatchNorm over all ranks within DDP, on CPUs, too, where torch's SyncBatchNorm takes no tensors.

    mpirun -np 4 python examples/torch_backend/sync_batchnorm.py

Classifies scikit-learn's digits (the extra `examples`) with 8 images in a batch of each rank: too
few for statistics of their own.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mntrain
import mntrain.torch_backend  # registers the backend


def main() -> None:
    """Train, and print the accuracy on all samples."""
    dist.init_process_group("mntrain")
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    dataset = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    with mntrain.init() as world:
        world.sync_batchnorm(model)  # in place of nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
        sampler = DistributedSampler(dataset)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch, targets in DataLoader(dataset, batch_size=8, sampler=sampler):
                nn.functional.cross_entropy(ddp(batch), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        batch, targets = dataset[list(DistributedSampler(dataset, shuffle=False))]
        with torch.inference_mode():
            right = (model(batch).argmax(1) == targets).float().mean()
        dist.all_reduce(right, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
