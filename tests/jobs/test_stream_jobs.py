"""Whole jobs over an IterableDataset, against the same samples in one process."""

import sys

import pytest
from job import completed, metrics
from launch import mpirun

TASK = '''
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from mntrain.tasks import Loss, Sum, Task


class Numbers(IterableDataset):
    """The numbers from 0 to 29 in the order of a generator."""

    own = False

    def __iter__(self):
        order = torch.randperm(30).tolist()
        if self.own:
            info = get_worker_info()
            order = range(info.id, 30, info.num_workers)
        for number in order:
            yield torch.tensor([float(number)])


class Own(Numbers):
    own = True


class Stream(Task):
    kind = Numbers

    def model(self):
        return torch.nn.Linear(1, 1).double()

    def dataset(self, split):
        return self.kind() if split == "train" else TensorDataset(torch.arange(5.0)[:, None])

    def loss(self, model, batch):
        x = (batch[0] if isinstance(batch, list) else batch).double()
        return Loss((model(x) - x).square().mean(), len(x), {"total": Sum(x.sum())})


class OwnStream(Stream):
    kind = Own
'''

OPTIONS = [
    *("--task", "own:Stream", "--train.steps", "9", "--train.batch-size", "7"),
    *("--train.micro-batch-size", "2", "--optim.lr", "1e-3", "--device", "cpu"),
    *("--run.dir", "run"),
]


def train(ranks, folder, *options):
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(TASK)
    command = [sys.executable, "-m", "mntrain", *OPTIONS, *options]
    return mpirun(ranks, command, cwd=folder, timeout=250)


def steps(folder):
    return [(line["samples"], line["metrics"]["total"], line["loss"]) for line in metrics(folder)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The samples, their sum and the loss of each step of one process."""
    folder = tmp_path_factory.mktemp("alone")
    completed(train(1, folder))
    found = steps(folder)
    assert [samples for samples, _, _ in found] == [7, 7, 7, 7, 2, 7, 7, 7, 7]
    assert sum(total for _, total, _ in found[:5]) == sum(range(30))
    assert found[0] != found[5]  # another order in the second epoch
    return found


def close(found, expected):
    return [pytest.approx(step, rel=1e-6) for step in expected] == found


@pytest.mark.exhaustive
def test_a_stream_is_resumed_at_another_size(tmp_path, alone):
    saves = ["--checkpoint.every", "2"]
    completed(train(3, tmp_path, *saves, "--zero.stage", "2", "--run.stop-after", "6"))
    second = train(2, tmp_path, *saves, "--data.workers", "1", "--zero.stage", "1")
    assert completed(second).report().count("the training data is a stream, whose content") == 1
    assert close(steps(tmp_path), alone)


@pytest.mark.exhaustive
def test_a_stream_that_shards_itself_gives_each_sample_to_one_rank(tmp_path):
    completed(train(2, tmp_path, "--task", "own:OwnStream", "--train.steps", "5"))
    found = steps(tmp_path)
    assert sum(samples for samples, _, _ in found) == 30
    assert sum(total for _, total, _ in found) == sum(range(30))
