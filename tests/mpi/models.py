"""Models with which a layout of buckets and shards may go wrong.

Each takes rows of 5 numbers (the language model: tokens) and gives rows of 3.
"""

import torch
from torch import nn
from torch.nn import functional


def net(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).to(dtype)


class Tiny(nn.Module):
    """Three elements, fewer than four ranks, in parameters of 0, 1, 0 and 2; one is a scalar."""

    def __init__(self):
        super().__init__()
        self.no_rows = nn.Parameter(torch.zeros(0, 5))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.shift = nn.Parameter(torch.tensor([0.5, -1.0]))

    def forward(self, x):
        x = torch.cat([self.no_rows, x])
        return torch.cat([self.scale * x[:, :1], x[:, 1:3] + self.shift], dim=1)


class WithEmpty(nn.Module):
    """Has a parameter of no elements, and a scalar."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.no_rows = nn.Parameter(torch.zeros(0, 5))
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        rows = torch.cat([self.no_rows, x])
        return self.scale * self.inner(rows)


class Lopsided(nn.Module):
    """One giant parameter among many of one to three elements."""

    def __init__(self):
        super().__init__()
        self.before = nn.ParameterList([torch.rand(1 + i % 3) for i in range(7)])
        self.giant = nn.Linear(5, 301, bias=False)
        self.after = nn.ParameterList([torch.rand(()) for _ in range(6)])

    def forward(self, x):
        hidden = torch.tanh(self.giant(x)).view(len(x), 7, 43).mean(2)
        parts = [h * p.sum() for h, p in zip(hidden.T, self.before, strict=True)]
        a, b, c, d, e, f = self.after
        return torch.stack(
            [a * parts[0] + b * parts[1], c * parts[2] - d * parts[3], e * sum(parts) + f], dim=1
        )


class Mixed(nn.Module):
    """Parameters of two dtypes, in turn."""

    def __init__(self, outer=torch.float32, inner=torch.bfloat16):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8).to(outer), nn.Linear(8, 3).to(outer)
        self.middle = nn.Linear(8, 8).to(inner)

    def forward(self, x):
        hidden = torch.tanh(self.first(x)).to(self.middle.weight.dtype)
        return self.last(torch.tanh(self.middle(hidden)).to(self.last.weight.dtype))


class Tied(nn.Module):
    """Its first and its last weight are one parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 3)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Fickle(nn.Module):
    """Branches that are used in some steps, on some ranks, in some steps of some, and never."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(2, 2)
        self.first = nn.Linear(5, 8)
        self.sometimes, self.somewhere, self.both = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x, step, rank):
        hidden = torch.tanh(self.first(x))
        if step == 1:
            hidden = torch.tanh(self.sometimes(hidden))
        if rank == 1:
            hidden = torch.tanh(self.somewhere(hidden))
        if (step + rank) % 3 == 0:
            hidden = self.both(hidden)
        return self.last(hidden)


class Strided(nn.Module):
    """Parameters that lie in memory in another order than their elements, or with gaps."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 16).T)
        self.gappy = nn.Parameter(torch.randn(6)[::2])

    def forward(self, x):
        image = torch.cat([x, x[:, :3] * x[:, 2:], x, x], dim=1).view(len(x), 2, 3, 3)
        return torch.tanh(self.conv(image)).flatten(1) @ self.turned + self.gappy


class TiedTokenModel(nn.Module):
    """Its embedding and head are one parameter; its norm is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def loss_at(model, batch, step, rank):
    """The mean loss of a rank's part of a step's batch."""
    inputs, targets = batch
    place = (step, rank) if isinstance(model, Fickle) else ()
    return functional.cross_entropy(model(inputs, *place), targets)


def double(kind):
    def build():
        torch.manual_seed(4)
        return kind().double()

    return build


MODELS = {
    "tiny": double(Tiny),
    "lopsided": double(Lopsided),
    "mixed": lambda: Mixed(torch.float64, torch.float32),
    "tied": double(Tied),
    "fickle": double(Fickle),
    "strided": double(Strided),
}
