"""Sharded optimizer state under torchrun, without MPI.

    torchrun --nproc-per-node 2 examples/torchrun.py

Learns which of three arms of a spiral a point is on.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zero


def spiral(per_arm: int = 500) -> TensorDataset:
    """Return three arms of noisy points in the plane; the same on every rank."""
    noise = torch.Generator().manual_seed(0)
    radius = torch.linspace(0.05, 1, per_arm)
    angles = [
        arm * 2.1 + 4 * radius + 0.2 * torch.randn(per_arm, generator=noise) for arm in range(3)
    ]
    points = [torch.stack([radius * a.sin(), radius * a.cos()], dim=1) for a in angles]
    return TensorDataset(torch.cat(points), torch.arange(3).repeat_interleave(per_arm))


def main() -> None:
    """Train, and print the accuracy on all points."""
    dist.init_process_group("gloo")
    dataset = spiral()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=25, sampler=sampler)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    optimizer = zero.ZeroOptimizer(
        model, torch.optim.AdamW, zero.TorchCollectives(), stage=2, max_grad_norm=1.0, lr=3e-3
    )
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for points, arms in loader:
            loss = nn.functional.cross_entropy(model(points), arms)
            loss.backward()  # buckets are reduced while backward still runs
            optimizer.step()
            optimizer.zero_grad()
    points, arms = dataset.tensors
    with torch.inference_mode():
        accuracy = (model(points).argmax(1) == arms).float().mean()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
