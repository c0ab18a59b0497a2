"""An example of a custom training loop: mpirun -np 4 python examples/own_loop.py."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mntrain


class Net(nn.Module):
    """A spiral classifier, whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )

    def forward(self, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy of a batch of points and their arms."""
        points, arms = batch
        return nn.functional.cross_entropy(self.layers(points), arms)


def spiral(per_arm: int = 500) -> TensorDataset:
    """Return three arms of noisy points in the plane; the same on every rank."""
    noise = torch.Generator().manual_seed(0)
    radius = torch.linspace(0.05, 1, per_arm)
    angles = [
        arm * 2.1 + 4 * radius + 0.2 * torch.randn(per_arm, generator=noise) for arm in range(3)
    ]
    points = [torch.stack([radius * a.sin(), radius * a.cos()], dim=1) for a in angles]
    return TensorDataset(torch.cat(points), torch.arange(3).repeat_interleave(per_arm))


loader = DataLoader(spiral(), batch_size=50, shuffle=True)  # global batches: 50 samples a step
with mntrain.init() as world:
    model = Net().to(world.device)
    optimizer = world.optimizer(model, torch.optim.AdamW, lr=3e-3, stage=2, max_grad_norm=1.0)
    for epoch in range(20):
        for batch in world.shard(loader):
            loss = model([tensor.to(world.device) for tensor in batch])
            loss.backward()  # buckets are reduced while backward still runs
            step = optimizer.step()
            optimizer.zero_grad()
        mean_loss = world.mean(loss.item(), weight=len(batch[0]))
        if world.rank == 0:
            print(f"epoch {epoch:2d}  loss {mean_loss:.4f}  gradient norm {step.grad_norm:.3f}")
