import math
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from mntrain.config import Config, TrainConfig
from mntrain.tasks import Loss, Losses, Mean, Task
from mntrain.train import sample_check
from mntrain.train.consensus import model_digest
from mntrain.train.hardware import Speeds
from mntrain.train.job_data import JobData
from mntrain.train.sample_check import check_validation, try_training
from mntrain.train.trial import Trial


class Points(Task):
    """Five points with labels for validation, under the name `valid_sets` gives them."""

    valid_sets = ("",)

    def model(self):
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def dataset(self, split):
        data = TensorDataset(torch.randn(5, 2), torch.randn(5, 1))
        return data if split == "train" else dict.fromkeys(self.valid_sets, data)

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        x, y = batch
        return Loss((model(x) - y).square().mean(), len(x))


class Unreadable(Points):
    def dataset(self, split):
        class Broken(TensorDataset):
            def __getitem__(self, index):
                raise KeyError("label")

        whole = super().dataset("train")
        return whole if split == "train" else {"news": Broken(*whole.tensors)}


class Uncollated(Points):
    @staticmethod
    def collate(samples):
        return samples[99]


class Failing(Points):
    def loss(self, model, batch):
        x, _ = batch
        assert x.dtype == torch.float64, "points must be\nfloat64"


class OfNoLoss(Points):
    def loss(self, model, batch):
        return super().loss(model, batch).mean


class Nowhere(Points):
    valid_sets = ()

    def loss(self, model, batch):
        raise AssertionError


def check(kind, micro_batch_size=2):
    config = Config(task="own:Points", train=TrainConfig(micro_batch_size=micro_batch_size))
    task = kind(config)
    nodes = SimpleNamespace(nodes=((0,),))
    world = SimpleNamespace(rank=0, size=1, topology=nodes, gather=lambda value: [value])
    model = task.model()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    data = JobData(world, config, task, None, Speeds([1.0]))
    torch.set_rng_state(state)
    try:
        check_validation(task, model, data, config.task, floats=None, autocast=None)
    finally:
        assert task.calls == 0
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == [True, True, True, False, True]
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", [Points, Nowhere])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_a_task_that_can_be_evaluated_passes_and_leaves_no_trace(kind, micro_batch_size):
    check(kind, micro_batch_size)


LINE = r"\(test_sample_check.py, line \d+\)"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Unreadable, "a sample of the validation data news cannot be read: KeyError: 'label' "),
        (Uncollated, "collate fails on samples of the validation data: IndexError: list index out"),
        (Failing, "loss() fails on samples of the validation data: AssertionError: points must be"),
    ],
)
def test_an_error_of_the_task_is_one_line_with_its_place(kind, sentence):
    with pytest.raises(ValueError, match=re.escape("--task own:Points: " + sentence)) as raised:
        check(kind)
    assert re.search(LINE + "$", str(raised.value))
    assert "\n" not in str(raised.value)


def test_a_result_that_is_no_loss_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"returned a Tensor: return mntrain\.tasks\.Loss"):
        check(OfNoLoss)


class Counting(Points):
    """Points with a generator of their own, a list and a kept model; one sample may be broken."""

    broken = False

    def model(self):
        self.net, self.seen = super().model(), []
        return self.net

    def dataset(self, split):
        class Noisy(TensorDataset):
            def __getitem__(self, index):
                if Counting.broken:
                    raise KeyError("label")
                return (super().__getitem__(index)[0] + random.random(), torch.randn(1))

        return Noisy(torch.randn(5, 2)) if split == "train" else None

    def loss(self, model, batch):
        self.seen.append(len(batch))
        noise = torch.rand(1) + random.random() + np.random.random()
        return super().loss(self.net, [batch[0] + noise, batch[1]])


class Uncollatable(Counting):
    collate = staticmethod(Uncollated.collate)


class FailingAtOnce(Counting):
    loss = Failing.loss


class FailingLater(Counting):
    def loss(self, model, batch):
        assert self.calls < 1, "the second call"
        return super().loss(model, batch)


class Detached(Counting):
    def loss(self, model, batch):
        with torch.no_grad():
            return super().loss(model, batch)


class Infinite(Counting):
    def loss(self, model, batch):
        return Loss(super().loss(model, batch).mean.detach() * math.inf, 2)


class OverNothing(Counting):
    def loss(self, model, batch):
        return Loss(super().loss(model, batch).mean.detach(), 0)


class Overwritten(Counting):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        factor = torch.ones((), requires_grad=True) * 2
        product = found.mean * factor
        factor.mul_(3)
        return Loss(product, found.count)


class Uncounted(Counting):
    def loss(self, model, batch):
        return Losses({"box": Mean(super().loss(model, batch).mean, len(batch[0]))})


class Miscounted(Uncounted):
    def counts(self, batch):
        return {"box": 1}


class Counted(Uncounted):
    def counts(self, batch):
        return {"box": len(batch[0])}


class Hooked(Counting):
    """A hook of the model keeps what the loss reads: in a dictionary of the task."""

    def model(self):
        model, self.kept = super().model(), {}
        model[0].register_forward_hook(lambda module, args, out: self.kept.update(out=out))
        return model

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return Loss(found.mean + self.kept.pop("out").square().mean(), found.count)


class HookedByAMethod(Hooked):
    """As an attribute that a method of the task sets."""

    def model(self):
        model = Counting.model(self)
        model[0].register_forward_hook(self.keep)
        return model

    def keep(self, module, args, out):
        self.kept = {"out": out}


class Shared(Hooked):
    """In an object that the model has, too."""

    def model(self):
        model = Counting.model(self)
        model[0].context = self.context = SimpleNamespace()
        model[0].register_forward_hook(self.keep)
        return model

    @staticmethod
    def keep(module, args, out):
        module.context.kept = out

    def loss(self, model, batch):
        self.kept = {"out": None}
        found = Counting.loss(self, model, batch)
        return Loss(found.mean + self.context.kept.square().mean(), found.count)


class Collected(Hooked):
    """As Hooked, in a list that the loss empties."""

    def model(self):
        model, self.kept = Counting.model(self), []
        model[0].register_forward_hook(lambda module, args, out: self.kept.append(out))
        return model

    def loss(self, model, batch):
        found = Counting.loss(self, model, batch)
        total = sum(out.square().mean() for out in self.kept)
        self.kept.clear()
        return Loss(found.mean + total, found.count)


class Prompted(Counting):
    """The task holds the only parameter of its model that is trained."""

    def model(self):
        model = super().model().requires_grad_(False)
        model[0].prompt = self.prompt = nn.Parameter(torch.ones(2))
        return model

    def loss(self, model, batch):
        return super().loss(model, [batch[0] + self.prompt, batch[1]])


class Patched(Counting):
    """BatchNorm with a forward that calls the one before."""

    def model(self):
        model = super().model()
        forward = model[1].forward
        model[1].forward = lambda x: 2 * forward(x)
        return model


class Nested(Counting):
    """The task keeps a module of the model deep in a list, and calls it there."""

    def model(self):
        model = super().model()
        self.parts = [[model[1]]]
        return model

    def loss(self, model, batch):
        self.parts[0][0](torch.randn(3, 4))
        return super().loss(model, batch)


class Queued(Counting):
    """Writes into a large tensor."""

    def model(self):
        self.queue = torch.zeros(1 << 19)
        return super().model()

    def loss(self, model, batch):
        self.queue += 1
        return super().loss(model, batch)


class Averaging(Counting):
    """Writes into a small array."""

    def model(self):
        self.queue = np.zeros(8)
        return super().model()

    def loss(self, model, batch):
        self.queue += 1
        return super().loss(model, batch)


class Full(Counting):
    def loss(self, model, batch):
        raise MemoryError("no room for copies")


class Uncopied(Counting):
    """A model that cannot be copied, and a loss that would fail."""

    def model(self):
        model = super().model()
        model[0].kept = model[0].weight * 2
        return model

    def loss(self, model, batch):
        raise AssertionError


class Streamed(Counting):
    def dataset(self, split):
        class Endless(IterableDataset):
            def __iter__(self):
                raise AssertionError

        return Endless() if split == "train" else None


def train_once(kind, *, batch_size=4, broken=False, monkeypatch=None):
    if broken:
        monkeypatch.setattr(Counting, "broken", True)
    config = Config(task="own:Points", train=TrainConfig(batch_size=batch_size, micro_batch_size=2))
    task = kind(config)
    world = SimpleNamespace(
        rank=0, size=2, topology=SimpleNamespace(nodes=((0, 1),)), gather=lambda value: [value] * 2
    )
    model = task.model()
    model[2].eval()
    data = JobData(world, config, task, None, Speeds([1.0, 1.0]))
    trial = Trial(task, config.task, model, data, 0, None, None, recompute=False)

    def state():
        generators = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        modes = [module.training for module in model.modules()]
        return (
            *(model_digest(model), modes, [p.grad for p in model.parameters()]),
            *(task.calls, list(task.seen), task.net is model, *generators),
            *(len(getattr(task, "kept", ())), float(np.asarray(getattr(task, "queue", 0)).sum())),
        )

    before = state()
    found = try_training(trial, torch.device("cpu"), 2)
    if not found:  # the job goes on
        assert state() == before
    return found


@pytest.mark.parametrize(
    "kind",
    [Counting, FailingLater, Counted, Infinite, OverNothing, Full, Uncopied, Streamed],
)
def test_a_task_that_can_be_trained_or_not_be_tried_passes_and_leaves_no_trace(kind):
    assert train_once(kind) == ""


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Uncollatable, "collate fails on samples of the training data: IndexError: list index"),
        (
            FailingAtOnce,
            "loss() fails on samples of the training data: AssertionError: points must be",
        ),
        (Overwritten, "backward of the loss fails on samples of the training data: RuntimeError"),
    ],
)
def test_an_error_of_training_is_one_line_with_its_place(kind, sentence):
    found = train_once(kind)
    assert found.startswith(f"--task own:Points: {sentence}")
    assert re.search(r"\(\w+\.py, line \d+\)$", found)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Detached, "loss() returns a loss without a gradient for samples of the training data"),
        (Uncounted, "loss() of --task own:Points returned Losses, but the task has no counts()"),
        (Miscounted, "returned Losses with 2 items of the part box, but counts() said 1"),
    ],
)
def test_a_loss_that_has_no_backward_is_refused_before_the_first_step(kind, sentence):
    assert sentence in train_once(kind)


@pytest.mark.parametrize(
    "kind",
    [Hooked, HookedByAMethod, Shared, Collected, Prompted, Patched, Nested, Queued, Averaging],
)
def test_a_task_that_shares_objects_with_its_model_passes_and_leaves_no_trace(kind):
    assert train_once(kind) == ""


def test_a_sample_that_cannot_be_read_is_named_and_a_rank_without_one_passes(monkeypatch):
    said = train_once(Counting, broken=True, monkeypatch=monkeypatch)
    assert "a sample of the training data cannot be read: KeyError: 'label' (test_sample" in said
    assert train_once(Counting, batch_size=1, broken=True, monkeypatch=monkeypatch) == ""


def test_training_is_not_tried_if_memory_is_short(monkeypatch):
    monkeypatch.setattr(sample_check, "available_memory", lambda: 500)
    assert train_once(Detached) == ""
