"""Forked children of a rank: memory of their own, and no part in the job."""

import faulthandler
import os
import signal
import sys
import traceback

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, Dataset
from worlds import RANKS, make_world

from mntrain.comm import forked

pytestmark = [
    # Of newer Pythons at a fork beside threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

WIDTH = 300  # several pages of parameters
EXHAUSTIVE = pytest.mark.exhaustive
STAGES = [pytest.param(0, marks=EXHAUSTIVE), 1, pytest.param(2, marks=EXHAUSTIVE)]


@pytest.fixture
def world():
    with make_world() as world:
        yield world


class Fork:
    """A child that runs a function at `go`; `status` is its exit status, 0 if nothing failed."""

    def __init__(self, function):
        ready, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.read(ready, 1)
                function()
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
            os._exit(0)
        os.close(ready)

    def status(self):
        """Let the child go on, and wait for its end."""
        os.write(self._go, b"!")
        os.close(self._go)
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)


def shared(world):
    """Ones in memory that the ranks of a node share."""
    return world.collectives.allocate(5000, torch.float32, torch.device("cpu")).fill_(1)


def trained(world, stage):
    """A model after one step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = world.optimizer(model, torch.optim.SGD, stage=stage, lr=0.1, overlap_forward=True)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.wait_for_parameters()
    return model, optimizer


@pytest.mark.parametrize("stage", STAGES)
def test_a_child_and_its_parent_do_not_see_what_the_other_writes(world, stage):
    model, optimizer = trained(world, stage)
    at_fork = [parameter.detach().clone() for parameter in model.parameters()]

    def compare_and_zero():
        assert all(map(torch.equal, model.parameters(), at_fork))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not any(parameter.any() for parameter in model.parameters())

    child = Fork(compare_and_zero)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.wait_for_parameters()
    trained_on = [parameter.detach().clone() for parameter in model.parameters()]
    assert not torch.equal(trained_on[0], at_fork[0])
    assert child.status() == 0
    MPI.COMM_WORLD.Barrier()
    assert all(map(torch.equal, model.parameters(), trained_on))


def test_gradients_that_a_child_zeroes_still_count_in_its_parent(world):
    weights = []
    for forks in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)
        model(torch.ones(1, WIDTH)).sum().backward()
        if forks:
            assert Fork(model.weight.grad.zero_).status() == 0
        optimizer.step()
        weights.append(model.weight.detach().clone())
        optimizer.close()
    assert torch.equal(*weights)


def test_children_of_children_and_later_children_have_copies_of_their_own(world):
    tensor = shared(world)

    def change_and_fork():
        tensor.fill_(2)
        assert Fork(lambda: tensor.fill_(3)).status() == 0
        assert set(tensor.tolist()) == {2}

    assert Fork(change_and_fork).status() == 0
    tensor.fill_(4)

    def see_four():
        assert set(tensor.tolist()) == {4}

    assert Fork(see_four).status() == Fork(see_four).status() == 0
    world.collectives.all_reduce(tensor).wait()  # ranks still share it
    assert set(tensor.tolist()) == {4 * RANKS}


@pytest.mark.exhaustive
def test_a_tensor_that_outlives_its_world_is_copied_too():
    with make_world() as world:
        tensor = shared(world)
        gone = world.collectives.allocate(7000, torch.float32, torch.device("cpu"))
    del world, gone
    assert Fork(tensor.zero_).status() == 0
    assert set(tensor.tolist()) == {1}


@pytest.mark.exhaustive
def test_a_child_for_which_there_is_no_copy_ends_instead_of_writing(world, monkeypatch):
    tensor = shared(world)
    original = forked._map

    def no_memory(nbytes, protection, at=0):
        return original(nbytes, protection, at) if at else 0

    monkeypatch.setattr(forked, "_map", no_memory)

    def write():
        faulthandler.disable()
        tensor.zero_()

    assert Fork(write).status() == -signal.SIGSEGV
    assert set(tensor.tolist()) == {1}


def test_a_child_cannot_communicate_and_the_job_goes_on(world):
    pending = torch.ones(100_000)

    def try_all():
        for call in (
            lambda: world.sum([1.0]),
            lambda: world.gather(1),
            lambda: world.collectives.all_reduce(torch.ones(3)),
            work.wait,
            world.agreement,
        ):
            with pytest.raises(RuntimeError, match="forked child of a rank"):
                call()
        world.close()
        with world:
            pass

    held = world._engine._turn.acquire()  # so that the collective stays pending
    work = world.collectives.all_reduce(pending)
    child = Fork(try_all)
    world._engine._turn.release()
    assert held
    assert child.status() == 0
    work.wait()
    assert set(pending.tolist()) == {RANKS}
    assert world.sum([1.0]) == [RANKS]


class Features(Dataset):
    """Samples that a model on the worker computes, which the worker spoils afterwards."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            value = self.model.weight.sum()
            self.model.weight.zero_()
        return value


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_loaders_workers_have_the_model_of_the_epochs_begin(world, stage):
    model, optimizer = trained(world, stage)
    for _ in range(2):
        before = model.weight.detach().clone()
        loader = DataLoader(
            Features(model), num_workers=2, batch_size=None, multiprocessing_context="fork"
        )
        first = list(loader)[:2]  # one of each worker
        assert [value.item() for value in first] == [before.sum().item()] * 2
        assert torch.equal(model.weight, before)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.wait_for_parameters()
