"""Jobs of a few short steps."""

import os
from pathlib import Path

from mpi4py import MPI
from worlds import RANKS

from mntrain.options.config import (
    Config,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)
from mntrain.tasks.lm import LanguageModel


class Silent(LanguageModel):
    """The built-in task, which shows no text at the end of a job."""

    def sample(self, model):
        return ""


class Signalling(Silent):
    """Sends the last rank signals, in the forward of its second step."""

    signals = ()
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 2 and MPI.COMM_WORLD.rank == RANKS - 1:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return super().loss(model, batch)


def small(folder: Path, task: str = f"{__name__}:Silent", **train) -> Config:
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
