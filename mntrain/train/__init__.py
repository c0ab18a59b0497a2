"""The training job: setup, trainer, evaluation, summary. `run` is its entry in Python."""

from mntrain.train.entry import run

__all__ = ["run"]
