"""Checkpoints of a loop in one process: the best evaluation, and going back."""

import errno
import os

import numpy as np
import pytest
import torch
from torch import nn

import mntrain
from mntrain import AgreedError
from mntrain.checkpoint import saver


@pytest.fixture
def checkpoints(tmp_path):
    with mntrain.init(device="cpu") as world:
        model = nn.Linear(2, 1)
        optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)
        yield world.checkpoints(tmp_path, model=model, optimizer=optimizer, every=1000)


def saved(folder):
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoints/step-*"))


def test_a_better_evaluation_than_the_best_saved_one_is_saved_after_a_failure(
    checkpoints, tmp_path, monkeypatch, capfd
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints.restore()
    losses = [torch.tensor(0.9), np.float32(0.95), torch.tensor([0.5]), 0.6, 0.7]
    for step, loss in enumerate(losses, 1):
        with monkeypatch.context() as patch:
            if step == 3:
                patch.setattr(saver, "_write", full)
            checkpoints.save(step, eval_loss=loss)
            checkpoints.wait()
    assert saved(tmp_path) == [1, 4]
    assert os.strerror(errno.ENOSPC) in capfd.readouterr().err


def test_a_failed_save_that_was_waited_for_counts_and_leaves_the_best_one_to_save(
    checkpoints, tmp_path
):
    checkpoints.restore()
    checkpoints.save(1, eval_loss=0.9)
    checkpoints.wait()
    folder, kept = tmp_path / "checkpoints", tmp_path / "kept"
    folder.rename(kept)
    folder.touch()
    with pytest.raises(AgreedError):
        checkpoints.save(2, now=True, eval_loss=0.5)
    folder.unlink()
    kept.rename(folder)
    assert checkpoints.summary()["checkpoints"]["failed"] == 1
    checkpoints.save(3, eval_loss=0.6)
    checkpoints.wait()
    assert saved(tmp_path) == [1, 3]


@pytest.mark.parametrize("loss", ["0.5", torch.ones(2), 1j])
def test_the_loss_of_an_evaluation_is_a_number(checkpoints, loss):
    checkpoints.restore()
    with pytest.raises(AgreedError, match=r"save\(1\): eval_loss is .*: give a number$"):
        checkpoints.save(1, eval_loss=loss)
    checkpoints.save(1, eval_loss=0.5)


def test_a_run_without_a_checkpoint_cannot_go_back(checkpoints, tmp_path):
    assert (checkpoints.restore(), checkpoints.restore()) == (0, 0)
    checkpoints.save(1)
    with pytest.raises(AgreedError, match="has no checkpoint, and this loop has taken 1 steps"):
        checkpoints.restore()
    checkpoints.save(2, now=True)
    checkpoints.save(3)
    assert (checkpoints.restore(), saved(tmp_path)) == (2, [2])
    checkpoints.save(3, now=True)
    assert saved(tmp_path) == [2, 3]
