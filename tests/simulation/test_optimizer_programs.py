"""Random optimizers of random models on random nodes, against plain torch in one process."""

import copy
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_digest import model_digest
from models import MODELS, loss_at
from network import NetworkModel
from oracle import PlainTraining, assert_close, rows, samples
from search import searched
from simulated_worlds import SimulatedWorlds
from virtual_time import current

from mntrain.comm import algorithms

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Training:
    """Steps of a model, of which some parameters have no gradient on some ranks, or in some steps.

    Parts of a batch are of unequal sizes. `seed` decides the order of events, and the sizes.
    """

    seed: int
    hosts: tuple[int, ...]
    model: str
    stage: int
    partition: str
    bucket_mb: float
    algorithm: str
    overlap_forward: bool
    max_norm: float
    steps: int
    micro_batches: int
    network: NetworkModel

    @property
    def cuts(self) -> list[int]:
        """Return the bounds of the ranks' parts of a batch."""
        sizes = random.Random(self.seed).choices(range(1, 5), k=len(self.hosts))
        return [0, *accumulate(sizes)]

    def batch(self, step, turn):
        return samples(self.cuts[-1], seed=100 * step + turn)

    def part(self, step, turn, rank):
        """Return a rank's part of a micro-batch."""
        return rows(self.batch(step, turn), *self.cuts[rank : rank + 2])

    def alone(self, model):
        """Train in this process, by the losses of all ranks' parts."""
        plain, cuts = PlainTraining(model, ADAMW, self.max_norm), self.cuts
        for step in range(self.steps):
            losses = [
                loss_at(plain.model, self.part(step, turn, rank), step, rank) * (high - low)
                for turn in range(self.micro_batches)
                for rank, (low, high) in enumerate(pairwise(cuts))
            ]
            plain.step(sum(losses) / (cuts[-1] * self.micro_batches))
        return plain.model

    def on_rank(self, world, start):
        model, rank, cuts = copy.deepcopy(start), world.rank, self.cuts
        optimizer = world.optimizer(
            model,
            torch.optim.AdamW,
            stage=self.stage,
            partition=self.partition,
            overlap_forward=self.overlap_forward,
            max_grad_norm=None if math.isinf(self.max_norm) else self.max_norm,
            lr=0.01,
            weight_decay=0.1,
        )
        for step in range(self.steps):
            for turn in range(self.micro_batches):
                current().time.sleep(1e-5 * ((7 * rank + 3 * step + self.seed) % 4))
                last = turn == self.micro_batches - 1
                with nullcontext() if last else optimizer.no_sync():
                    loss = loss_at(model, self.part(step, turn, rank), step, rank)
                    optimizer.backward(loss, weight=cuts[rank + 1] - cuts[rank])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model


trainings = st.builds(
    Training,
    seed=st.integers(0, 1 << 32),
    hosts=st.lists(st.integers(0, 2), min_size=2, max_size=5).map(tuple),
    model=st.sampled_from(list(MODELS)),
    stage=st.integers(0, 2),
    partition=st.sampled_from(["auto", "element", "parameter"]),
    bucket_mb=st.sampled_from([1e-6, 1e-4, 1e-3, 1.0]),
    algorithm=st.sampled_from(algorithms.names()),
    overlap_forward=st.booleans(),
    max_norm=st.sampled_from([0.05, math.inf]),
    steps=st.integers(1, 4),
    micro_batches=st.integers(1, 2),
    network=st.builds(
        NetworkModel,
        message_s=st.sampled_from([0.0, 1e-6]),
        eager_bytes=st.sampled_from([0, 256, 64 << 10]),
        late_s=st.sampled_from([0.0, 1e-5, 1e-3]),
    ),
)


@pytest.mark.thorough
@searched(15)
@given(trainings)
def test_every_training_gives_the_weights_of_one_process(training):
    start = MODELS[training.model]()
    worlds = SimulatedWorlds(
        hosts=training.hosts,
        seed=training.seed,
        network=training.network,
        switches=0.1 * (training.seed % 4),
        options={"bucket_mb": training.bucket_mb, "algorithm": training.algorithm},
    )
    found = worlds.run(partial(training.on_rank, start=start))
    alone = training.alone(start)
    for model in found:
        assert_close(model, alone, 1e-5 if training.model == "mixed" else 1e-9)
    assert len(set(map(model_digest, found))) == 1
