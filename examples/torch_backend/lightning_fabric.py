"""A loop of Lightning Fabric, as its documentation has it, over MPI by the lines that name mntrain.

mpirun -np 2 python examples/torch_backend/lightning_fabric.py
"""

import lightning as L  # noqa: N812 - as in Lightning's documentation
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mntrain.torch_backend.lightning import MpiEnvironment


def main() -> None:
    """Train with accumulation, and print the mean of the ranks' last losses."""
    strategy = DDPStrategy(process_group_backend="mntrain")
    environment = MpiEnvironment()
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[environment])
    fabric.launch()
    fabric.seed_everything(0)
    samples = torch.randn(256, 8)
    dataset = TensorDataset(samples, samples.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))
    for _ in range(4):
        for number, (batch, targets) in enumerate(loader):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.mse_loss(model(batch), targets)
                fabric.backward(loss / 2)
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
    loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"loss {loss:.8f} on {fabric.world_size} ranks")


if __name__ == "__main__":
    main()
