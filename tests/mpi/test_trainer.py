"""The order in which a training job communicates, and how it stops for one of its ranks."""

import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from mpi4py import MPI
from worlds import RANKS, make_world

from mntrain.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig, ZeroConfig
from mntrain.tasks.lm import LanguageModel
from mntrain.trainer import INTERRUPTED, Trainer

pytestmark = pytest.mark.mpi

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class Interrupting(LanguageModel):
    """Presses Ctrl-C on the last rank, in the forward of its second step."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 2 and MPI.COMM_WORLD.rank == RANKS - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return super().loss(model, batch)


@pytest.fixture
def world():
    with make_world() as world:
        yield world


def small(folder: Path, task: str = "lm", **train) -> Config:
    """A job of four short steps, with one micro-batch on every rank."""
    corpus = folder / "corpus.txt"
    corpus.write_text("one and two make three\n" * 40)
    steps = {"steps": 4, "batch_size": RANKS, "eval_every": 0, "eval_samples": 2}
    return Config(
        task=task,
        device="cpu",
        data=DataConfig(path=corpus),
        model=ModelConfig(layers=2, heads=2, width=16, context=16),
        train=TrainConfig(**(steps | train)),
        zero=ZeroConfig(stage=2),
        run=RunConfig(dir=folder / "run"),
    )


def logged(log: list[str], owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = getattr(owner, name)

    def wrapped(*args, **kwargs):
        log.append(name)
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_nothing_queues_between_an_update_and_the_next_forward(world, tmp_path, monkeypatch):
    log: list[str] = []
    for verb in VERBS:
        logged(log, world.collectives, verb, monkeypatch)
    logged(log, world, "gather", monkeypatch)
    logged(log, LanguageModel, "loss", monkeypatch)
    trainer = Trainer(world, small(tmp_path))
    log.clear()
    assert trainer.fit() == 0
    starts = [index for index, name in enumerate(log) if name == "loss"][:4]
    for start, end in pairwise(starts):
        communicated = log[start + 1 : end]
        gathers = communicated.count("all_gather")
        assert gathers > 0
        assert communicated[-gathers:] == ["all_gather"] * gathers


def test_one_ranks_interrupt_stops_all_after_the_same_step(world, tmp_path):
    config = small(tmp_path, "test_trainer:Interrupting", steps=50)
    handler = signal.getsignal(signal.SIGINT)
    assert Trainer(world, config).fit() == INTERRUPTED
    assert signal.getsignal(signal.SIGINT) == handler
    if world.master:
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
