"""The end of a step that has failed on a rank, while others have not ended theirs."""

import threading
from types import SimpleNamespace

import pytest

import mntrain
from mntrain.errors import AgreedError
from mntrain.options.config import Config
from mntrain.train import shared_step
from mntrain.train.forward import Precision
from mntrain.train.shared_step import SharedStep
from zero.step_message import StepMessage


@pytest.fixture
def failing():
    """The shared step of a rank that waits, when its step fails, until `others` come."""
    others = threading.Event()

    def finish():
        assert others.wait(120)

    accumulation = SimpleNamespace(steps=0, message=StepMessage(), finish_interrupted=finish)
    optimizer = SimpleNamespace(
        coming_exchange=None,
        group=SimpleNamespace(size=1),
        accumulation=accumulation,
    )
    data = SimpleNamespace(sizes=(1, 1))
    job = SimpleNamespace(optimizer=optimizer, data=data, config=Config(), precision=Precision())
    with mntrain.init(device="cpu") as world:
        yield SharedStep(world, job, lambda: None), others


@pytest.mark.parametrize("waits", [True, False])
def test_a_failed_rank_prints_its_error_if_it_waits_for_long(failing, capfd, monkeypatch, waits):
    shared, others = failing
    monkeypatch.setattr(shared_step, "_PATIENCE_S", 0.05 if waits else 20)
    threading.Timer(0.5 if waits else 0, others.set).start()
    with shared.computing(1):
        raise KeyError("a bug")
    assert ("KeyError: 'a bug'" in capfd.readouterr().err) == waits
    message = shared._message
    message.send(SimpleNamespace(size=1, rank=0))
    assert message.read()["failed"]


def test_errors_that_all_ranks_know_are_raised_at_once(failing):
    shared, _ = failing
    with pytest.raises(AgreedError), shared.computing(1):
        raise AgreedError("of all", 0)
