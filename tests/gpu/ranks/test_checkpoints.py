"""Checkpoints do not depend on the device: they move from GPU to CPU and back.

The losses are those of one process on the CPU that was never interrupted.
"""

from contextlib import closing

import pytest
import torch
from models import net
from oracle import ADAMW, MAX_NORM, SHARED, PlainTraining, loss_of, mine, samples, update
from torch import nn
from worlds import RANKS, shared_folder

import mntrain
from gpu.place import CUDA, ON, gpu, synchronize
from gpu.ranks.transports import make_world
from mntrain import checkpoint
from mntrain.checkpoint import DirectorySaver, Manifest, Saved

pytestmark = [pytest.mark.mpi, *gpu]

STEPS, SAVED = 6, 3
WAYS = [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")] if CUDA else [("cpu", "cpu")]
WIDE = 2048 if CUDA else 256
MANIFEST = Manifest(SAVED, {"task": "none"}, samples=12, skipped_steps=0, eval_loss=None)


@pytest.fixture
def folder():
    with shared_folder() as path:
        yield path


def world_on(device):
    if device == "cpu":
        return mntrain.init(device="cpu", algorithm="lanes", ranks_per_node=2, bucket_mb=SHARED)
    return make_world()


def train(world, model, optimizer, steps):
    """The loss over the whole of every step's batch."""
    losses = []
    for step in steps:
        batch = [column.to(world.device) for column in mine(world, samples(12, step))]
        loss = loss_of(model, batch)
        update(optimizer, loss)
        losses.append(world.sum([float(loss.detach())])[0] / RANKS)
    return losses


def losses_alone():
    alone, losses = PlainTraining(net(), ADAMW, MAX_NORM), []
    for step in range(STEPS):
        loss = loss_of(alone.model, samples(12, step))
        alone.step(loss)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("first", "then"), WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training_goes_on_on_the_other_device(folder, stage, first, then):
    with closing(world_on(first)) as world:
        model = net().to(world.device)
        optimizer = world.optimizer(model, ADAMW, stage=stage, max_grad_norm=MAX_NORM)
        losses = train(world, model, optimizer, range(SAVED))
        DirectorySaver(world, Saved(model, optimizer), folder, 3).save(MANIFEST)
    with closing(world_on(then)) as world:
        model = net().to(world.device)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer = world.optimizer(model, ADAMW, stage=stage, max_grad_norm=MAX_NORM)
        checkpoint.load(checkpoint.newest(world, folder), model, optimizer, world)
        losses += train(world, model, optimizer, range(SAVED, STEPS))
    assert losses == pytest.approx(losses_alone(), rel=1e-9)


def test_what_is_saved_while_training_goes_on_is_of_its_step(folder):
    """The next step changes the weights while the last one's are still being copied and written."""
    torch.manual_seed(2)
    wide = nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3))
    with closing(world_on(ON)) as world:
        model = wide.double().to(world.device)
        optimizer = world.optimizer(model, ADAMW, stage=1)
        saver = DirectorySaver(world, Saved(model, optimizer), folder, 3)
        train(world, model, optimizer, range(SAVED))
        expected = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        saver.begin(MANIFEST)
        train(world, model, optimizer, range(SAVED, STEPS))
        saver.finish()
        synchronize()
        checkpoint.load(checkpoint.newest(world, folder), model, optimizer, world)
        found = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
