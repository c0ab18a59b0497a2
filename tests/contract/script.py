"""The registry of scripts, and the models and batches that several of them use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from contract.kits import PlainTorch

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

    train: Callable[[PlainTorch], dict[str, Any]]
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


def make(kit, model=None, optimizer_class=SGD, **options):
    """A model, `net()` if none is given, and its optimizer."""
    model = kit.ddp(net() if model is None else model)
    return model, kit.optimizer(model, optimizer_class, **(options or {"lr": 0.5, "momentum": 0.9}))


def backwards(kit, model, optimizer, data=None, loss=loss_of):
    """Yield every batch between its backward and its step."""
    for x, y in kit.shard(batches() if data is None else data):
        loss(model, x, y).backward()
        yield x, y
        step(optimizer)


def step(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def train(kit, model=None, optimizer_class=SGD, *, data=None, loss=loss_of, **options):
    """The plain loop, as the whole of a script."""
    model, optimizer = make(kit, model, optimizer_class, **options)
    for _ in backwards(kit, model, optimizer, data, loss):
        pass
    return {"model": model}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.trunk, self.left, self.right = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.double()

    def forward(self, x, heads=("left", "right")):
        hidden = self.trunk(x).tanh()
        return sum(getattr(self, head)(hidden) for head in heads)
