"""The order in which a training job communicates, and how it stops for one of its ranks."""

import signal
from dataclasses import replace

import pytest
import torch
from job import metrics, summary
from mpi4py import MPI
from small_jobs import Signalling, small
from worlds import RANKS, make_world

from mntrain.checkpoint.reader import inspect, list_checkpoints
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import CheckpointConfig, ZeroConfig
from mntrain.run.signals import StopRequests
from mntrain.tasks.lm import LanguageModel
from mntrain.train.entry import exit_code
from mntrain.train.trainer import Trainer

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank


@pytest.fixture
def world():
    with make_world() as world:
        yield world


@pytest.fixture
def sums(monkeypatch):
    """The dtypes of all tensors that are summed over ranks."""
    dtypes: list[torch.dtype] = []
    all_reduce = WorldCollectives.all_reduce

    def counted(self, tensor, wire=None):
        dtypes.append(tensor.dtype)
        return all_reduce(self, tensor, wire)

    monkeypatch.setattr(WorldCollectives, "all_reduce", counted)
    return dtypes


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_of_a_job_has_one_small_message_and_its_norm(world, tmp_path, sums, stage):
    config = small(tmp_path)
    trainer = Trainer(world, replace(config, zero=ZeroConfig(stage=stage)))
    for step in (1, 2):  # in which ranks learn the names of metrics
        trainer.train_step(step)
    micro_batches = len(next(trainer.batches))
    sums.clear()
    trainer.train_step(3)
    announced = micro_batches if stage == 2 else 0
    assert sums.count(torch.float64) == 2 + announced  # alone, there is no message
    trainer.job.directory.close()


def test_copies_of_metrics_begin_before_the_time_of_the_first_step(world, tmp_path, monkeypatch):
    events = []

    def noted(kind, name):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *own: events.append(name) or method(*own))

    noted(MetricsFiles, "__init__")
    noted(StopRequests, "poll")
    assert fit(world, small(tmp_path)) == 0
    assert events[:2] == (["poll"] * 2 if RANK else ["__init__", "poll"])


def fit(world, config, **changes):
    return exit_code(Trainer(world, replace(config, **changes)).fit())


@pytest.mark.parametrize(
    ("signals", "status", "code"),
    [
        ([signal.SIGINT], "interrupted", 130),
        pytest.param([signal.SIGTERM], "preempted", 75, marks=pytest.mark.thorough),
        pytest.param([signal.SIGUSR1, signal.SIGUSR1], "preempted", 75, marks=pytest.mark.thorough),
        ([signal.SIGUSR2, signal.SIGTERM, signal.SIGINT], "preempted", 75),
    ],
)
def test_a_signal_on_one_rank_ends_all_ranks_after_the_same_step(
    tmp_path, capsys, *, signals, status, code
):
    Signalling.signals = signals
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]
    with make_world() as world:
        assert fit(world, small(tmp_path, "small_jobs:Signalling", steps=50)) == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)] == handlers
    if world.master:
        assert len(metrics(tmp_path)) == 2
        found = summary(tmp_path)
        assert found["status"] == status
        assert found["reason"] == f"{signals[0].name} on rank {RANKS - 1}"
        # Who only interrupts gets the checkpoints asked for: none.
        saved = [path.name for path in list_checkpoints(tmp_path / "run")]
        assert saved == (["step-00000002"] if status == "preempted" else [])
        told = capsys.readouterr().out.count("the steps of this job were not saved: with --checkp")
        assert told == (status == "interrupted")


def test_a_job_ends_before_its_deadline(world, tmp_path):
    config = small(tmp_path, steps=10**6)
    assert fit(world, config, run=replace(config.run, max_minutes=2 / 60)) == 75
    if world.master:
        found = summary(tmp_path)
        assert found["status"] == "preempted"
        assert found["reason"] == "its 0.0333333 minutes are over"
        newest = list_checkpoints(tmp_path / "run")[0]
        assert inspect(newest).step == found["steps"] == len(metrics(tmp_path))


def good_enough(task, record):
    """Ask on the last rank, after the fourth step, for the run to end."""
    return "good enough" if RANK == RANKS - 1 and record.step == 4 else None


@pytest.mark.parametrize("callback", ["on_step", "on_evaluation"])
def test_a_callback_of_one_rank_ends_the_run_on_all(world, tmp_path, monkeypatch, callback):
    monkeypatch.setattr(LanguageModel, callback, good_enough)
    config = small(tmp_path, steps=50, eval_every=2)
    assert fit(world, config, checkpoint=CheckpointConfig(every="40")) == 0
    if world.master:
        found = summary(tmp_path)
        assert (found["status"], found["reason"]) == ("stopped", "good enough")
        assert len(metrics(tmp_path)) == 5  # in which all ranks learn of it
        assert found["checkpoint"].endswith("step-00000005")
