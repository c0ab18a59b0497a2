"""The registry of scripts, and the models and batches that several of them use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from contract.kits import Alone

SCRIPTS: list["Script"] = []


@dataclass(frozen=True, eq=False)
class Script:
    """A training script: what it returns must be the same here as in the reference.

    `train(kit)` returns models, tensors and numbers by name. `refused` says at which stages mntrain
    refuses it on several ranks, and with which words; `refused_alone`, whether also on a single
    one. `stages` are those at which it holds. The reference is DDP, or a single process ("alone")
    where DDP itself raises or lets ranks diverge. `needs` is a program without which the test is
    skipped.
    """

    train: Callable[[Alone], dict[str, Any]]
    refused: Mapping[int, str] = field(default_factory=dict)
    refused_alone: bool = False
    stages: tuple[int, ...] = (0, 1, 2)
    reference: str = "ddp"
    needs: str = ""
    thorough: bool = False

    def __str__(self) -> str:
        return self.train.__name__


def script(**options):
    """Register a function as a script."""

    def register(train):
        SCRIPTS.append(Script(train, **options))
        return train

    return register


def net(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def batches(count=4, samples=12, seed=0):
    """Global batches of inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(samples, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (samples,), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model, x, y):
    return functional.cross_entropy(model(x), y)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.trunk, self.left, self.right = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.double()

    def forward(self, x, heads=("left", "right")):
        hidden = self.trunk(x).tanh()
        return sum(getattr(self, head)(hidden) for head in heads)
