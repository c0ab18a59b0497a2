"""What a rank does whose step has failed, while others have not ended theirs."""

import threading

import pytest

import mntrain
from mntrain.errors import AgreedError
from mntrain.train import failed_step
from mntrain.train.failed_step import FailedStep
from zero.step_message import StepMessage


class Waiting:
    """An optimizer whose collectives wait for other ranks until `others` come."""

    def __init__(self):
        self.others = threading.Event()

    def finish_interrupted(self):
        assert self.others.wait(20)


@pytest.fixture
def world():
    with mntrain.init(device="cpu") as made:
        yield made


def test_a_failed_rank_that_waits_for_long_prints_its_error(world, capfd, monkeypatch):
    monkeypatch.setattr(failed_step, "_PATIENCE_S", 0.05)
    optimizer = Waiting()
    told = threading.Timer(0.5, optimizer.others.set)
    told.start()
    step = FailedStep(world, optimizer.finish_interrupted)
    with step.caught(StepMessage()):
        raise KeyError("a bug")
    told.join()
    assert step.flag
    said = capfd.readouterr().err
    assert "mntrain: rank 0 failed, and waits for the others to end the step:\n" in said
    assert "KeyError: 'a bug'" in said


def test_one_that_does_not_wait_prints_nothing(world, capfd):
    optimizer = Waiting()
    optimizer.others.set()
    with FailedStep(world, optimizer.finish_interrupted).caught(StepMessage()):
        raise KeyError("a bug")
    assert capfd.readouterr().err == ""


def test_errors_that_all_ranks_know_are_raised_at_once(world):
    step = FailedStep(world)
    with pytest.raises(AgreedError), step.caught(StepMessage()):
        raise AgreedError("of all", 0)
    assert not step.flag
