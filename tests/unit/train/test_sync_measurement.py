"""The measurement of a step leaves a job as it was, and counts the bytes of a model."""

import random
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mntrain.config import Config, TrainConfig
from mntrain.tasks import Loss, Losses, Mean, Task
from mntrain.train import sync_measurement
from mntrain.train.consensus import model_digest
from mntrain.train.hardware import Speeds
from mntrain.train.job_data import JobData
from mntrain.train.sync_measurement import (
    MeasurementError,
    measure_computing,
    measure_wire,
    volumes_of,
)
from mntrain.train.trial import Trial


class Noisy(Dataset):
    """Nine points, each with noise of every generator there is; counts what is read."""

    def __init__(self):
        self.own = np.random.default_rng(5)
        self.torchs = torch.Generator().manual_seed(5)
        self.read = 0

    def __len__(self):
        return 9

    def __getitem__(self, index):
        self.read += 1
        noise = self.own.random() + random.random() + np.random.random()
        noise += float(torch.rand((), generator=self.torchs)) + float(torch.rand(()))
        return torch.tensor([index + noise, 1.0]), torch.ones(1)


class Points(Task):
    """A net with statistics, dropout and a counter; the task keeps the net, and counts calls."""

    slow_s = 0.0

    def model(self):
        self.net = nn.Sequential(
            nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Dropout(0.5), nn.Linear(4, 1)
        )
        self.calls, self.lengths, self.mean = 0, [], torch.zeros(())
        return self.net

    def dataset(self, split):
        return Noisy() if split == "train" else None

    def loss(self, model, batch):
        self.calls += 1
        self.lengths.append(len(batch))
        self.mean += 1
        model.seen = self.calls
        time.sleep(self.slow_s)
        x, y = batch
        out = self.net(x) + torch.rand(1) + random.random() + np.random.random()  # not by `model`
        return Loss((out - y).square().mean(), len(x))


class Parts(Points):
    def loss(self, model, batch):
        mean = super().loss(model, batch).mean
        nothing = torch.tensor(float("nan"))
        return Losses({"box": Mean(mean, 2), "mask": Mean(nothing, 0)}, {"box": 0.5})


class Failing(Points):
    def loss(self, model, batch):
        raise KeyError("a bug\nof the task")


class OfNoLoss(Points):
    def loss(self, model, batch):
        return super().loss(model, batch).mean


class Streamed(Points):
    def dataset(self, split):
        class Endless(IterableDataset):
            def __iter__(self):
                raise AssertionError

        return Endless() if split == "train" else None


def prepared(kind, *, batch_size=8, recompute=False, rank=0, size=1):
    config = Config(task="own:Points", train=TrainConfig(batch_size=batch_size, micro_batch_size=3))
    task = kind(config)
    world = SimpleNamespace(
        rank=rank,
        size=size,
        topology=SimpleNamespace(nodes=(tuple(range(size)),)),
        gather=lambda value: [value],
        device=torch.device("cpu"),
    )
    data = JobData(world, config, task, None, Speeds([1.0] * size))
    model = task.model()
    return world, Trial(task, "own:Points", model, data, 0, None, None, recompute)


def state_of(trial):
    """Everything that later steps depend on."""
    data, task = trial.data._train, trial.task
    return (
        model_digest(trial.model),
        [module.training for module in trial.model.modules()],
        [p.grad for p in trial.model.parameters()],
        {name: type(value) for name, value in vars(trial.model).items()},
        (task.calls, list(task.lengths), float(task.mean)),
        task.net is trial.model,
        torch.get_rng_state().tolist(),
        random.getstate(),
        [*map(str, np.random.get_state(legacy=False)["state"]["key"])],
        str(data.own.bit_generator.state),
        data.torchs.get_state().tolist(),
        data.read,
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [Points, Parts])
def test_nothing_of_a_job_changes(kind, recompute):
    world, trial = prepared(kind, recompute=recompute)
    trial.model[2].eval()
    before = state_of(trial)
    found = measure_computing(world, trial)
    assert state_of(trial) == before
    assert not hasattr(trial.model, "seen")
    assert found.micro_batches == 3
    assert 0 < 3 * found.backward_s < found.step_s < 5


def test_a_step_has_the_time_of_all_its_micro_batches():
    world, trial = prepared(Points)
    trial.task.slow_s = 0.02
    found = measure_computing(world, trial)
    assert 3 * 0.02 <= found.step_s < 3 * 0.2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Failing, r"KeyError: 'a bug.*of the task' on rank 0"),
        (OfNoLoss, r"TypeError: loss\(\) of --task own:Points returned a Tensor.* on rank 0"),
        (Streamed, "samples of a stream cannot be drawn ahead of its first step on rank 0"),
    ],
)
def test_what_cannot_be_measured_has_a_reason_and_changes_nothing_either(kind, reason):
    world, trial = prepared(kind)
    digest, state = model_digest(trial.model), torch.get_rng_state()
    with pytest.raises(MeasurementError, match=reason):
        measure_computing(world, trial)
    assert model_digest(trial.model) == digest
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in trial.model.parameters())


def test_a_failure_of_another_rank_is_one_of_all():
    world, trial = prepared(Points)
    world.gather = lambda value: [value, "KeyError: 'x'" if value == "" else value]
    with pytest.raises(MeasurementError, match=re.escape("KeyError: 'x' on rank 1")):
        measure_computing(world, trial)


def test_a_rank_without_a_sample_computes_nothing_and_the_slowest_counts():
    world, trial = prepared(Points, batch_size=1, size=3)  # rank 2 has the sample
    rows = []

    def gather(value):
        rows.append(value)
        return [value, (7.0, 2.0, 4)] if isinstance(value, tuple) and len(value) == 3 else [value]

    world.gather = gather
    found = measure_computing(world, trial)
    assert rows[-1] == (0.0, 0.0, 0)
    assert (found.step_s, found.backward_s, found.micro_batches) == (7.0, 2.0, 4)


def test_the_first_micro_batch_is_that_of_training():
    _, trial = prepared(Points)
    count, samples = trial.data.first_micro_batch(0)
    before = trial.data._train.read
    micro_batches = next(iter(trial.data.batches(0, 1)))
    assert trial.data._train.read > before  # by training itself, after the copy was read
    assert count == len(micro_batches)
    points = torch.stack([point for point, _ in samples])
    assert torch.equal(points, micro_batches[0][0])


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("narrow", [False, True])
def test_volumes_are_those_of_trained_parameters(stage, narrow):
    model = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(300)),
            nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(5, dtype=torch.float64)),
            nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
            nn.Parameter(torch.zeros(1000), requires_grad=False),
        ]
    )
    found = volumes_of(model, stage=stage, narrow_gather=narrow)
    assert found.gradients == 4 * 300 + 2 * 7 + 8 * 5 + 8 * 3
    assert found.bf16 == 2 * 300 + 2 * 7 + 2 * 5 + 8 * 3
    assert found.int8 == (300 + 2 * 4) + (7 + 4) + (5 + 4) + 8 * 3
    assert found.gathered == (0 if not stage else found.bf16 if narrow else found.gradients)
    assert found.exchanged == 4 * 300 + 4 * 7 + 8 * 5 + 8 * 3


def test_a_batch_of_tensors_is_read_without_a_copy_of_the_dataset():
    class Tensors(Points):
        def dataset(self, split):
            return TensorDataset(torch.rand(9, 2), torch.rand(9, 1)) if split == "train" else None

    world, trial = prepared(Tensors)
    addresses = [tensor.data_ptr() for tensor in trial.data._train.tensors]
    measure_computing(world, trial)
    assert [tensor.data_ptr() for tensor in trial.data._train.tensors] == addresses


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("latency_s", [0.0, 1e-4, 0.05])
def test_latency_is_not_counted_as_bandwidth(monkeypatch, nodes, latency_s):
    per_byte = 1e-9
    monkeypatch.setattr(
        sync_measurement,
        "_all_reduce_s",
        lambda world, nbytes: latency_s + 2 * (nodes - 1) / nodes * nbytes * per_byte,
    )
    found = measure_wire(
        SimpleNamespace(topology=SimpleNamespace(nodes=[[r] for r in range(nodes)]))
    )
    assert found == pytest.approx((latency_s, per_byte), rel=1e-4, abs=1e-8)


def test_a_link_without_measurable_bandwidth_has_a_finite_one(monkeypatch):
    monkeypatch.setattr(sync_measurement, "_all_reduce_s", lambda world, nbytes: 0.01)
    world = SimpleNamespace(topology=SimpleNamespace(nodes=[[0], [1]]))
    latency_s, s_per_byte = measure_wire(world)
    assert latency_s == 0.01
    assert 0 < s_per_byte < 1e-13
