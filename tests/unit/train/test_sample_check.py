import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mntrain.config import Config, TrainConfig
from mntrain.tasks import Loss, Task
from mntrain.train.evaluation import check_validation
from mntrain.train.job_data import JobData


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
    data = JobData(world, config, task, None)
    torch.set_rng_state(state)
    try:
        check_validation(task, model, data, config.task, (None, None))
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
