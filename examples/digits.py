"""An example of a task: handwritten digits, and a small convolutional network with batch norm.

    mpirun -np 4 python -m mntrain --task examples.digits:Digits --train.steps 100

or, in this folder, `--task digits:Digits`. Needs scikit-learn, which ships the digits.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mntrain.options.config import Config
from mntrain.tasks import Loss, Split, Task


class Digits(Task):
    """Classification of 1797 grey images of 8 x 8 pixels into ten digits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        try:
            from sklearn.datasets import load_digits  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ImportError("the digits need scikit-learn: pip install scikit-learn") from error
        digits: Any = load_digits()
        # The images are ordered by writer; both splits should contain all writers.
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        self._images = torch.tensor(digits.images / 16, dtype=torch.float32)[order, None]
        self._labels = torch.tensor(digits.target, dtype=torch.int64)[order]
        self._train = len(order) - max(1, round(len(order) * config.data.valid_fraction))

    def model(self) -> nn.Module:
        """Return a network from images (b, 1, 8, 8) to the logits of the classes (b, 10)."""
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def dataset(self, split: Split) -> TensorDataset:
        """Return pairs of an image (1, 8, 8) in [0, 1] and its label."""
        rows = slice(self._train) if split == "train" else slice(self._train, None)
        return TensorDataset(self._images[rows], self._labels[rows])

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return the mean cross-entropy of images and labels, and the accuracy."""
        images, labels = batch
        logits = model(images).float()
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return Loss(F.cross_entropy(logits, labels), len(labels), {"accuracy": accuracy})
