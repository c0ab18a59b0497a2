"""A loop of accelerate, as its documentation has it, over MPI by the two lines that name mntrain.

mpirun -np 2 python examples/torch_backend/accelerate_loop.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mntrain.torch_backend  # noqa: F401 - registers the backend


def main() -> None:
    """Train, and print the loss over the samples of all ranks."""
    dist.init_process_group("mntrain")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    samples = torch.randn(256, 8)
    dataset = TensorDataset(samples, samples.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
    accelerator.print(f"loss {losses.mean():.4f} on {accelerator.num_processes} ranks")
    accelerator.end_training()


if __name__ == "__main__":
    main()
