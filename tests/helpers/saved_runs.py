"""Runs with checkpoints for the tests of `python -m mntrain ckpt`."""

import math
from pathlib import Path

import torch
from torch import nn

import mntrain
from mntrain.checkpoint import DirectorySaver, Manifest, Saved


class SavedModel(nn.Module):
    """Has tied weights, several dtypes, a scalar, an empty parameter, and buffers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.norm, self.coarse = nn.BatchNorm1d(6), nn.Linear(6, 6).bfloat16()
        self.scale, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        wide = torch.tensor([0.0, math.nan, math.inf], dtype=torch.float64)
        self.register_buffer("wide", wide)


class Other(SavedModel):
    """Differs from SavedModel by a shape, a dtype, a missing and an additional tensor."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 6), nn.Linear(6, 7, bias=False).double()
        self.more = nn.Parameter(torch.ones(2))
        del self.mask


class Many(nn.Module):
    """Has 60 parameters."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([torch.full((2,), float(i)) for i in range(60)])


def save_all(folder: Path) -> None:
    """Save all runs, and the state of the first model as run.pt."""
    with mntrain.init(device="cpu") as world:
        model = seeded(SavedModel)
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
        for step in (1, 2):
            train(model, optimizer)
            save(world, model, optimizer, folder / "run", step)
        torch.save(model.state_dict(), folder / "run.pt")
        nudge(model)
        save(world, model, optimizer, folder / "nudged", 2)
        for kind in (Other, Many):
            model = seeded(kind)
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.25)
            for step in (1, 2):
                train(model, optimizer)
                save(world, model, optimizer, folder / kind.__name__, step)


def seeded(kind):
    torch.manual_seed(3)
    return kind()


def train(model, optimizer):
    sum(parameter.double().square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(world, model, optimizer, folder, step):
    progress = Manifest(step, {"task": "none"}, samples=12, skipped_steps=0, eval_loss=None)
    folder.mkdir(exist_ok=True)
    DirectorySaver(world, Saved(model, optimizer), folder, keep=3).save(progress)


@torch.no_grad()
def nudge(model):
    model.tokens.weight[2, 3] += 0.5
    model.coarse.weight[-1] *= 1.25
    model.norm.num_batches_tracked += 3
    model.norm.running_mean[:2] = math.nan
    model.norm.running_var[0] = math.inf
    model.mask[1] = True
    model.wide[0] = -0.0
