"""Jobs whose ranks have different numbers of micro-batches, against torch on the same batches."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import ClassVar

import pytest
import torch
from job import lines_of
from mpi4py import MPI
from oracle import PlainTraining, assert_parity
from torch import nn
from torch.utils.data import TensorDataset
from worlds import RANKS, first_ranks

import mntrain
from mntrain.balance.own_pace import OwnPace
from mntrain.data.randomness import permuted
from mntrain.options.balance import BalanceConfig
from mntrain.options.config import (
    CheckpointConfig,
    Config,
    OptimConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)
from mntrain.tasks import Loss, Task
from mntrain.train.trainer import Trainer

pytestmark = pytest.mark.simulated

SAMPLES, MICRO, STEPS, LR, SEED = 391, 2, 24, 0.05, 7  # epochs end with a part of a step
TOLERANCE = 1e-12  # in fp64


def make_data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True).sin())


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


class CadencedRegression(Task):
    """A regression that remembers its samples, by step and micro-batch."""

    seen: ClassVar[list[list[list[int]]]] = []
    now: ClassVar[list[list[int]]] = []
    by_rank: ClassVar[list[tuple[int, ...]]] = []  # `world.batch_counts` in each step
    world: ClassVar[mntrain.world.World]

    def model(self):
        return make_model()

    def dataset(self, split):
        return make_data() if split == "train" else None

    def loss(self, model, batch):
        index, x, y = batch
        self.now.append(index.tolist())
        return Loss(nn.functional.mse_loss(model(x), y), len(x))

    def on_step(self, record):
        self.seen.append(list(self.now))
        self.now.clear()
        self.by_rank.append(self.world.batch_counts)


def config_of(folder, *, stage=0, stop_after=None, max_anchor=0, speed=(), norm=None):
    return Config(
        task=f"{__name__}:CadencedRegression",
        device="cpu",
        optim=OptimConfig(
            name="SGD",
            lr=LR,
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            max_grad_norm=norm,
        ),
        train=TrainConfig(steps=STEPS, micro_batch_size=MICRO, eval_every=0, check_every=5),
        zero=ZeroConfig(stage=stage),
        balance=BalanceConfig(mode="cadence", max_anchor=max_anchor, speed=speed),
        checkpoint=CheckpointConfig(every="1000"),
        run=RunConfig(dir=folder / "run", seed=SEED, stop_after=stop_after),
    )


@pytest.fixture
def speeds(monkeypatch):
    """Let the last rank seem to take 4 times as long for a sample, and communication 2 s."""
    take = OwnPace.take

    def as_if(self, *args):
        measured = take(self, *args)
        slow = MPI.COMM_WORLD.rank == RANKS - 1
        return measured._replace(
            seconds=measured.samples * (1.0 if slow else 0.25),
            waits=tuple(2.0 if slow else 30.0 for _ in measured.waits),
        )

    monkeypatch.setattr(OwnPace, "take", as_if)


def order():
    """The samples of all epochs, without an end."""
    return (i for epoch in count() for i in permuted(0, SAMPLES, SAMPLES, SEED, epoch).tolist())


def train(config, world):
    """Run the job, which takes all of its steps; return its trainer."""
    CadencedRegression.seen, CadencedRegression.now, CadencedRegression.by_rank = [], [], []
    CadencedRegression.world = world
    trainer = Trainer(world, config)
    assert trainer.fit()["status"] in ("completed", "stopped")
    return trainer


def trained_alone(sizes, norm=None):
    """The oracle, which has taken a step on each batch of these sizes, and the losses."""
    alone = PlainTraining(make_model(), partial(torch.optim.SGD, lr=LR), norm or math.inf)
    losses, samples = [], order()
    _, x, y = make_data().tensors
    for size in sizes:
        batch = list(islice(samples, size))
        loss = nn.functional.mse_loss(alone.model(x[batch]), y[batch])
        alone.step(loss)
        losses.append(loss.item())
    return alone, losses


def expect_parity(world, trainer, config, norm=None):
    """Compare the weights, the losses and the order of samples with a single process."""
    records = lines_of(config.run.dir)
    sizes = [record["samples"] for record in records]
    alone, losses = trained_alone(sizes, norm)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-9)
    assert_parity(world, trainer._model, alone, TOLERANCE)
    return sizes


def expect_order(world, sizes):
    """Compare the samples of the steps of the last job with the order of all epochs."""
    by_rank = world.gather(CadencedRegression.seen)
    seen = [
        [sample for rank in step for micro_batch in rank for sample in micro_batch]
        for step in zip(*by_rank, strict=True)
    ]
    assert [len(step) for step in seen] == sizes[-len(seen) :]
    by_step = [tuple(map(len, step)) for step in zip(*by_rank, strict=True)]
    assert CadencedRegression.by_rank == by_step
    expected = list(islice(order(), sum(sizes)))[-sum(sizes[-len(seen) :]) :]
    assert [sample for step in seen for sample in step] == expected
    return by_rank


@pytest.mark.parametrize(
    ("stage", "layout"), [(1, 2), (0, None), (1, None), (2, None), (0, 2), (2, 2)]
)
def test_weights_are_those_of_one_process_on_the_same_batches(speeds, folder, stage, layout):
    config = config_of(folder, stage=stage, norm=0.3)
    with mntrain.init(ranks_per_node=layout, device="cpu") as world:
        trainer = train(config, world)
        sizes = expect_parity(world, trainer, config, norm=0.3)
        by_rank = expect_order(world, sizes)
        plans = json.loads((config.run.dir / "summary.json").read_text())["cadence"]
        whole = [len(rank[1]) for rank in by_rank]
    assert plans[0] == {"step": 1, "anchor": 10, "batch_counts": [10] * RANKS, "overhead": None}
    # 10 micro-batches take 20 s on the last rank: communication is 10 % of that.
    assert plans[1:] == [
        {"step": 11, "anchor": 10, "batch_counts": [40] * (RANKS - 1) + [10], "overhead": 0.1}
    ]
    assert whole == plans[0]["batch_counts"]
    assert sum(sizes) > SAMPLES


@pytest.mark.parametrize(
    "before",
    [RANKS, 1],
)
def test_a_run_goes_on_in_the_middle_of_a_plan_on_other_ranks(speeds, folder, before):
    after = RANKS - 1 if before == RANKS else RANKS
    first = config_of(folder, stage=1, stop_after=14)
    with first_ranks(before) as comm:
        if comm is not None:
            with mntrain.init(comm, device="cpu") as world:
                train(first, world)
    second = config_of(folder, max_anchor=3, speed=("0:0.5",))
    with first_ranks(after) as comm:
        if comm is not None:
            with mntrain.init(comm, device="cpu") as world:
                trainer = train(second, world)
                sizes = expect_parity(world, trainer, second)
                assert len(expect_order(world, sizes)[0]) == STEPS - 14
                plan = json.loads((second.run.dir / "summary.json").read_text())["cadence"][0]
                counts = [3] + [6] * (after - 1)
                assert plan == {"step": 15, "anchor": 3, "batch_counts": counts, "overhead": None}


def test_a_job_clips_the_gradient_of_each_rank(folder):
    config = config_of(folder, stop_after=3)
    balance = replace(config.balance, max_rank_grad_norm=0.01)
    with mntrain.init(device="cpu") as world:
        train(replace(config, balance=balance), world)
    norms = [record["grad_norm"] for record in lines_of(config.run.dir)]
    assert all(0.005 < norm < 0.01 for norm in norms)  # of the mean over ranks


def test_a_cadence_is_of_jobs_alone():
    with mntrain.init(device="cpu") as world:
        assert world.batch_counts is None
        with pytest.raises(ValueError, match="give True or False; a cadence is of training jobs"):
            world.shard([1, 2], balance="cadence")
