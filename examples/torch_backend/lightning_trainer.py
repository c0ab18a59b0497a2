"""The Lightning Trainer, as its documentation has it, over MPI by the lines that name mntrain.

mpirun -np 2 python examples/torch_backend/lightning_trainer.py
"""

import tempfile

import lightning as L  # noqa: N812 - as in Lightning's documentation
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mntrain.torch_backend.lightning import MpiEnvironment


class Regression(L.LightningModule):
    """A linear model, whose losses are logged over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        samples, targets = batch
        loss = nn.functional.mse_loss(self.model(samples), targets)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        """Log the loss of a batch."""
        samples, targets = batch
        self.log("loss", nn.functional.mse_loss(self.model(samples), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    """Train, validate the best checkpoint, and print its loss."""
    L.seed_everything(0)
    samples = torch.randn(250, 8)
    dataset = TensorDataset(samples, samples.sum(1, keepdim=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="mntrain"),
        plugins=[MpiEnvironment()],
        max_epochs=3,
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_progress_bar=False,
    )
    training = DataLoader(dataset, batch_size=16, shuffle=True)
    validation = DataLoader(dataset, batch_size=16)
    trainer.fit(Regression(), training, validation)
    (result,) = trainer.validate(ckpt_path="best", dataloaders=validation, verbose=False)
    if trainer.is_global_zero:
        print(f"loss {result['loss']:.8f} on {trainer.world_size} ranks", flush=True)


if __name__ == "__main__":
    main()
